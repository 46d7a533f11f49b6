// A trace of torch's profiler, recorded on the server and downloaded: it opens in Perfetto.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { api, randomId, ROOT } from "../http.js";
import { t } from "../messages.js";
import { store } from "../store.js";

const STEPS = [10, 50, 200];
const ASK_MS = 1000;

/** The trace, or null while it is not written. @param {string} name @param {AbortSignal} signal @returns {Promise<Blob|null>} */
async function fetched(name, signal) {
  const headers = store.key ? { Authorization: `Bearer ${store.key}` } : {};
  const answer = await fetch(new URL(`live/profiles/${name}`, ROOT), { headers, signal, credentials: "omit", cache: "no-store" });
  return answer.ok ? answer.blob() : null;
}

/** Offers a file to the reader. @param {Blob} blob @param {string} name */
function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Waits until the server has written the trace. */
async function waited(name, signal) {
  for (;;) {
    const blob = await fetched(name, signal);
    if (blob) return blob;
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
    signal.throwIfAborted();
  }
}

export function Profile() {
  const [steps, setSteps] = useState(STEPS[1]);
  const [state, setState] = useState(/** @type {{text: string, running?: boolean, blob?: Blob, name?: string}} */ ({ text: "" }));
  const stop = useRef(/** @type {AbortController|null} */ (null));
  useEffect(() => () => stop.current?.abort(), []);
  const run = async () => {
    stop.current = new AbortController();
    const id = `page-${randomId(4)}`;
    const name = `${id}-TP-0.trace.json.gz`;
    try {
      await api("start_profile", { body: { num_steps: steps, profile_id: id } });
      setState({ text: t("profile.running", { steps }), running: true });
      const blob = await waited(name, stop.current.signal);
      setState({ text: t("profile.done", { where: name }), blob, name });
    } catch (error) {
      if (error.name !== "AbortError") setState({ text: t("profile.failed", { why: error.message }) });
    }
  };
  const end = () => api("stop_profile", { body: {} }).catch((error) => setState({ text: t("profile.failed", { why: error.message }) }));
  return html`<div class="tools">
    <span role="status" class="small muted">${state.text}</span>
    ${state.blob && html`<button type="button" class="small" onClick=${() => save(state.blob, state.name)}>${t("profile.get")}</button>`}
    ${state.running
      ? html`<button type="button" class="small" onClick=${end}>${t("profile.stop")}</button>`
      : html`<label>${t("profile.steps")} <select value=${steps} onChange=${(event) => setSteps(Number(event.target.value))}>${STEPS.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>
        <button type="button" class="small" onClick=${run}>${t("profile.start")}</button>`}
  </div>`;
}
