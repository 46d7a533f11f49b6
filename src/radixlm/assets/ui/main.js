// The shell: header, views by address (#/chat, #/live, ...), the dialog for the key.

import { html, render, Component, useEffect, useRef, useState } from "./vendor/preact.js";
import { keys } from "./http.js";
import { t } from "./messages.js";
import { store } from "./store.js";

const VIEWS = ["chat", "live", "tree", "play", "server", "docs"];
const GATEWAY_VIEWS = ["chat", "workers"];
const THEME = "radixlm.theme";

/** The view and its path in the address: "#/live/abc" is ["live", "abc"]. */
function place() {
  const [, name = "", ...rest] = location.hash.split("/");
  try {
    return [name, rest.map(decodeURIComponent).join("/")];
  } catch {
    return [name, ""]; // an escape that is cut
  }
}

function themeNow() {
  const saved = localStorage.getItem(THEME);
  if (saved === "light" || saved === "dark") return saved;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function applyTheme() {
  document.documentElement.dataset.theme = themeNow();
}

/** Shows why a view failed in the view's place. */
class Boundary extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<div class="notice bad" role="alert">
      <h1>${t("app.failed")}</h1><pre>${String(error?.stack ?? error)}</pre>
      <button onClick=${() => location.reload()}>${t("app.reload")}</button>
    </div>`;
  }
}

function KeyDialog({ why, onDone }) {
  const dialog = useRef(null);
  const input = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
    input.current.focus();
  }, []);
  const done = (isSet) => {
    if (isSet) store.key = input.current.value.trim();
    onDone(isSet);
  };
  const submit = (event) => {
    event.preventDefault();
    done(true);
  };
  const forget = () => {
    store.key = "";
    onDone(false);
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onCancel=${() => done(false)}>
    <form onSubmit=${submit}>
      <h2 id="key-title">${t("key.title")}</h2>
      <p>${why || t("key.why")}</p>
      <label>${t("key.label")}
        <input ref=${input} type="password" autocomplete="off" spellcheck=${false} required />
      </label>
      <p class="muted small">${t("key.where")}</p>
      <div class="row end">
        ${store.key && html`<button type="button" onClick=${forget}>${t("key.forget")}</button>`}
        <button type="button" onClick=${() => done(false)}>${t("key.cancel")}</button>
        <button class="primary">${t("key.save")}</button>
      </div>
    </form>
  </dialog>`;
}

function Header({ view, views, status, onKey }) {
  const [theme, setTheme] = useState(themeNow());
  const other = theme === "dark" ? "light" : "dark";
  const change = () => {
    localStorage.setItem(THEME, other);
    applyTheme();
    setTheme(other);
  };
  const { model, has_key, version } = store.info;
  return html`<header class="top">
    <a class="brand" href="#/chat" title=${`RadixLM ${version}`}>
      <img src="icons/favicon.svg" alt="" width="20" height="20" />RadixLM</a>
    <nav aria-label=${t("app.nav")}>${views.map((name) => html`<a key=${name}
      href=${`#/${name}`} aria-current=${name === view ? "page" : null}>${t(`view.${name}`)}</a>`)}</nav>
    <span class="grow"></span>
    <span role="status" class=${`status ${status}`}>${t(`status.${status}`)}</span>
    <span class="model" title=${model ?? ""}>${model ?? ""}</span>
    ${has_key && html`<button class="quiet" onClick=${onKey}>${t("app.key")}</button>`}
    <button class="quiet icon" onClick=${change} title=${t("app.theme", { theme: t(`app.${other}`) })}
      aria-label=${t("app.theme", { theme: t(`app.${other}`) })}>${theme === "dark" ? "☀" : "☾"}</button>
  </header>`;
}

function App() {
  const [[view, path], setPlace] = useState(place());
  const [loaded, setLoaded] = useState({});
  const [status, setStatus] = useState(store.status);
  const [asked, setAsked] = useState(null);
  const [, setInfo] = useState(null);
  const views = store.info.is_gateway ? GATEWAY_VIEWS : VIEWS;
  const name = views.includes(view) ? view : views[0];
  useEffect(() => {
    const move = () => setPlace(place());
    addEventListener("hashchange", move);
    keys.ask = (why) => new Promise((resolve) => setAsked({ why, resolve }));
    store.load().then(setInfo, () => store.watchServer());
    const unwatch = store.onStatus(setStatus);
    return () => {
      removeEventListener("hashchange", move);
      unwatch();
    };
  }, []);
  useEffect(() => {
    if (loaded[name]) document.title = `${loaded[name].title} · RadixLM`;
    else import(`./views/${name}.js`).then(
      (module) => setLoaded((before) => ({ ...before, [name]: module })),
      (error) => setLoaded((before) => ({ ...before, [name]: { error } })),
    );
  }, [name, loaded]);
  const module = loaded[name];
  const View = module?.default;
  const answered = (isSet) => {
    asked.resolve?.(isSet);
    setAsked(null);
  };
  const skip = (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>${t("app.skip")}</a>
    <${Header} view=${name} views=${views} status=${status} onKey=${() => setAsked({ why: "" })} />
    <main id="main" tabindex="-1" class=${`view-${name}`}>
      <${Boundary} key=${name}>
        ${View ? html`<${View} store=${store} path=${path} />` : html`<p class="notice muted">
          ${module?.error ? `${t("app.failed")} ${module.error}` : t("app.loading")}</p>`}
      </${Boundary}>
    </main>
    ${asked && html`<${KeyDialog} why=${asked.why} onDone=${answered} />`}`;
}

applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
render(html`<${App} />`, document.getElementById("app"));
