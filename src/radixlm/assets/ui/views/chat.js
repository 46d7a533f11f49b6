// The chat: conversations at the left, messages, the composer, settings at the right.

import "./chat_messages.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { t } from "../messages.js";
import { Composer } from "./chat_composer.js";
import { Message } from "./chat_message.js";
import { Chats, children, path } from "./chat_model.js";
import { Runs } from "./chat_run.js";
import { Settings } from "./chat_settings.js";

export const title = t("view.chat");
const NARROW = "(max-width: 900px)";

// they outlive the view, so that an answer goes on while another view is open
const chats = new Chats();
const runs = new Runs(chats);

export default function Chat({ store }) {
  const [, draw] = useReducer((n) => n + 1, 0);
  const [models, setModels] = useState([]);
  const [hasList, setList] = useState(!matchMedia(NARROW).matches);
  const [hasSettings, setSettings] = useState(false);
  const [compared, setCompared] = useState(null);
  const [told, tell] = useState("");
  useEffect(() => {
    const unwatch = chats.watch(draw);
    if (!chats.talk) chats.load();
    api("v1/models").then((got) => setModels(got.data?.map(({ id }) => id) ?? []), () => {});
    return unwatch;
  }, []);
  const { talk } = chats;
  useEffect(() => setCompared(null), [talk?.id]);
  useShortcuts(setList);
  const actions = useMemo(() => actionsOf(store, tell, setCompared), []);
  if (!talk) return html`<h1 class="visually-hidden">${title}</h1>`;
  const model = talk.settings.model || models[0] || store.info.model || "the model";
  const at = compared && talk.nodes[compared];
  return html`<div class=${`chat ${hasList ? "" : "no-list"} ${hasSettings ? "has-settings" : ""}`}>
    <h1 class="visually-hidden">${title}</h1>
    ${hasList && html`<${List} tell=${tell} onChosen=${() => matchMedia(NARROW).matches && setList(false)} />`}
    <section class="talk" aria-label=${talk.title || t("chat.untitled")}>
      <div class="talk-head row">
        <button class="quiet icon" aria-expanded=${String(hasList)} onClick=${() => setList(!hasList)}>☰<span class="visually-hidden">${t("chat.show_list")}</span></button>
        <h2 class="grow" dir="auto">${talk.title || t("chat.untitled")}</h2>
        ${at && html`<button class="small" onClick=${() => setCompared(null)}>${t("chat.compare_end")}</button>`}
        <button class="quiet small" aria-expanded=${String(hasSettings)} onClick=${() => setSettings(!hasSettings)}>${t("chat.settings")}</button>
      </div>
      ${told && html`<p class="told" role="alert">${told} <button class="quiet icon small" aria-label=${t("chat.cancel")} onClick=${() => tell("")}>✕</button></p>`}
      ${chats.storageError && html`<p class="told">${t("chat.not_kept", { why: chats.storageError })}</p>`}
      ${at ? html`<${Compared} talk=${talk} node=${at} actions=${actions} />`
        : html`<${Messages} talk=${talk} model=${model} actions=${actions} />`}
      <${Composer} key=${talk.id} isRunning=${runs.any} onStop=${() => runs.stop()} onSend=${actions.send} tell=${tell} />
    </section>
    ${hasSettings && html`<${Settings} key=${talk.id} chats=${chats} models=${models} onClose=${() => setSettings(false)} />`}
    <${Announcer} talk=${talk} />
  </div>`;
}

function useShortcuts(setList) {
  useEffect(() => {
    const press = (event) => {
      if (event.key === "Escape" && runs.any && !document.querySelector("dialog[open]")) runs.stop();
      else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        setList(true);
        const search = () => /** @type {HTMLElement | null} */ (document.querySelector(".chat-list input[type=search]"));
        requestAnimationFrame(() => search()?.focus());
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function actionsOf(store, tell, setCompared) {
  const answer = async (talk, last) => {
    tell("");
    const node = await runs.answer(talk, last);
    if (node.error?.status === 0) store.watchServer();
  };
  return {
    tell,
    send(text, parts) {
      const { talk } = chats;
      setCompared(null);
      answer(talk, chats.add(talk, path(talk).at(-1)?.id ?? "root", { text, parts }).id);
    },
    edit(node, text) {
      const { talk } = chats;
      const { role, parts, call_id } = node;
      answer(talk, chats.add(talk, node.parent, { role, text, parts, call_id }).id);
    },
    regenerate: (node) => answer(chats.talk, node.parent),
    results(node, texts) {
      const { talk } = chats;
      let last = node.id;
      node.calls.forEach((call, i) => {
        last = chats.add(talk, last, { role: "tool", text: texts[i], call_id: call.id }).id;
      });
      answer(talk, last);
    },
    remove: (node) => chats.remove(chats.talk, node),
    compare: (node) => setCompared(node.id),
  };
}

function Messages({ talk, model, actions }) {
  const shown = path(talk);
  const place = useRef(null);
  const isAtEnd = useRef(true);
  const scrolled = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  useEffect(() => {
    isAtEnd.current = true;
  }, [talk.id, shown.length]);
  useEffect(() => {
    if (isAtEnd.current) place.current.scrollTop = place.current.scrollHeight;
  });
  return html`<div class="messages" ref=${place} onScroll=${scrolled} tabindex="0" role="region" aria-label=${t("chat.input")}>
    ${shown.length === 0 && html`<div class="empty"><h2>${t("chat.empty_title", { model })}</h2><p class="muted">${t("chat.empty")}</p></div>`}
    ${shown.map((node, i) => html`<${Message} key=${node.id} talk=${talk} node=${node} chats=${chats}
      runs=${runs} actions=${actions} isLast=${i === shown.length - 1} />`)}
  </div>`;
}

/** Two branches below one message, side by side. */
function Compared({ talk, node, actions }) {
  const siblings = children(talk, node.parent);
  const [left, setLeft] = useState(siblings.find((one) => one !== node)?.id ?? node.id);
  const [right, setRight] = useState(node.id);
  const column = (id, set) => {
    const shown = path(talk, node.parent, { ...talk.chosen, [node.parent]: id });
    return html`<div class="column">
      <select aria-label=${t("chat.compare")} value=${id} onChange=${(e) => set(e.currentTarget.value)}>
        ${siblings.map((one, i) => html`<option key=${one.id} value=${one.id}>${t("chat.branch", { i: i + 1, n: siblings.length })}</option>`)}
      </select>
      ${shown.map((one) => html`<${Message} key=${one.id} talk=${talk} node=${one} chats=${chats} runs=${runs} actions=${actions} isCompared />`)}
    </div>`;
  };
  return html`<div class="messages compared" role="group" aria-label=${t("chat.compared")}>${column(left, setLeft)}${column(right, setRight)}</div>`;
}

function List({ tell, onChosen }) {
  const [sought, setSought] = useState("");
  const picker = useRef(null);
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
  const found = chats.list.filter((talk) => {
    if (!words.length) return true;
    const text = [talk.title, ...Object.values(talk.nodes).map((n) => n.text)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const load = async (event) => {
    const input = event.currentTarget;
    const [file] = input.files;
    try {
      await chats.imported(await file.text());
    } catch {
      tell(t("chat.bad_import", { name: file.name }));
    }
    input.value = "";
  };
  const [isAsked, setAsked] = useState(false);
  const forget = () => {
    if (isAsked) chats.forgetAll();
    setAsked(!isAsked);
  };
  const choose = (talk) => {
    chats.choose(talk.id);
    onChosen();
  };
  return html`<nav class="chat-list" aria-label=${t("chat.list")}>
    <button class="primary" onClick=${() => { chats.begin(); onChosen(); }}>${t("chat.new")}</button>
    <input type="search" aria-label=${t("chat.search")} placeholder=${t("chat.search")} value=${sought} onInput=${(e) => setSought(e.currentTarget.value)} />
    <ul>${found.map((talk) => html`<li key=${talk.id}>
      <button class="quiet" aria-current=${talk === chats.talk ? "true" : null} onClick=${() => choose(talk)} dir="auto">${talk.title}</button>
      <button class="quiet icon delete" aria-label=${t("chat.delete_talk", { title: talk.title })} onClick=${() => chats.forget(talk)}>✕</button>
    </li>`)}</ul>
    ${!found.length && html`<p class="muted small">${t(words.length ? "chat.nothing" : "chat.none")}</p>`}
    <span class="grow"></span>
    ${isAsked && html`<p class="small" role="alert">${t("chat.forget_sure")}</p>`}
    <div class="row">
      <input ref=${picker} type="file" hidden accept=".json,application/json" aria-label=${t("chat.import")} onChange=${load} />
      <button class="small" onClick=${() => picker.current.click()}>${t("chat.import")}</button>
      <button class="small" disabled=${!chats.list.length} onClick=${() => download(chats.exported(), "radixlm-chats.json")}>${t("chat.export_all")}</button>
      <button class="small" disabled=${!chats.list.includes(chats.talk)} onClick=${() => download(chats.exported([chats.talk]), "radixlm-chat.json")}>${t("chat.export")}</button>
      <button class=${`small ${isAsked ? "danger" : ""}`} onClick=${forget}>${t("chat.forget")}</button>
      ${isAsked && html`<button class="small" onClick=${() => setAsked(false)}>${t("chat.cancel")}</button>`}
    </div>
    <p class="muted small">${t("chat.kept")}</p>
  </nav>`;
}

function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Reads growing answers aloud in whole sentences. */
function Announcer({ talk }) {
  const said = useRef({ id: "", length: 0 });
  const [sentences, setSentences] = useState([]);
  const last = path(talk).at(-1);
  const isRunning = last && runs.isRunning(last.id);
  useEffect(() => {
    if (!last || last.role !== "assistant") return;
    if (isRunning && said.current.id !== last.id) {
      said.current = { id: last.id, length: 0 };
      setSentences([]);
    }
    if (said.current.id !== last.id) return;
    const rest = last.text.slice(said.current.length);
    const end = isRunning ? Math.max(...[". ", "! ", "? ", "\n"].map((mark) => rest.lastIndexOf(mark) + 1)) : rest.length;
    if (end <= 0) return;
    said.current.length += end;
    setSentences((before) => [...before.slice(-20), rest.slice(0, Math.min(end, 2000))]);
  });
  return html`<div class="visually-hidden" role="log" aria-live="polite">${sentences.map((text, i) => html`<p key=${i}>${text}</p>`)}</div>`;
}
