// The live view: what the engine is doing now, and why a request is slow.
import { html, useEffect, useState } from "../vendor/preact.js";
import { t } from "../messages.js";
import "./live_messages.js";
import { Head } from "./live_head.js";
import { Deaths, Log, Speculation, Adapters, Replicas } from "./live_lists.js";
import { Memory } from "./live_memory.js";
import { LiveModel } from "./live_state.js";
import { Steps } from "./live_steps.js";
import { Waterfall } from "./live_waterfall.js";
import { useTopics } from "./live_parts.js";

export const title = "Live";

/** One for the page's life: what was heard stays when another view is opened. */
export const model = new LiveModel();

/** @param {{store: any, path: string}} props `path`: the request that is opened, if any */
export default function View({ store, path }) {
  const [status, setStatus] = useState(store.status);
  const [focused, setFocused] = useState(/** @type {null | [number, number]} */ (null));
  useTopics(model, ["head"], 1);
  useEffect(() => store.onStatus(setStatus), [store]);
  useEffect(() => model.attach(store), [store]);
  const note = status === "refused" || status === "lost" ? t(`live.${status}`) : model.head || model.rows.size ? "" : t("live.wait");
  return html`<div class="live">
    <h1 class="visually-hidden">${t("live.title")}</h1>
    <p class=${`live-note ${status}`} role="status" hidden=${!note}>${note}</p>
    <${Head} model=${model} />
    <${Waterfall} model=${model} path=${path} onSteps=${setFocused} />
    <${Steps} model=${model} focused=${focused} />
    <div class="live-grid">
      <${Memory} model=${model} />
      <${Deaths} model=${model} />
      <${Speculation} model=${model} />
      <${Adapters} model=${model} />
      <${Replicas} model=${model} />
    </div>
    <${Log} model=${model} />
  </div>`;
}
