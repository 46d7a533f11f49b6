// One request, opened: its facts, its phases, and the steps that it took part in.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { t } from "../messages.js";
import { clock, count, millis, seconds } from "../lib/format.js";
import { DataTable } from "../lib/table.js";
import { nameOf } from "./live_parts.js";

const TEXTS = ["prompt_text", "output_text"]; // with --ui-show-text
const FACTS = ["prompt", "cached", "out", "finish", "adapter", "priority", "tenant", "route"];

/** Asks the server for the request, again when it has ended. */
function useRequest(path, ended) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  useEffect(() => {
    const stop = new AbortController();
    api(`live/request/${encodeURIComponent(path)}`, { signal: stop.signal, quiet: true }).then(setFound, (error) => !stop.signal.aborted && setFound({ error }));
    return () => stop.abort();
  }, [path, ended]);
  return found;
}

function Spans({ row, now }) {
  const columns = [
    { key: "phase", label: t("fall.phase"), format: (phase) => t(`phase.${phase}`).replace(/ \(.*\)$/, "") },
    { key: "start", label: t("fall.start"), num: true, format: (at) => `+${seconds(at)}` },
    { key: "length", label: t("fall.length"), num: true, format: seconds },
    { key: "tokens", label: t("fall.tokens"), num: true, format: count },
  ];
  const rows = row.spans.map(([phase, from, to, tokens]) => ({ phase, start: from - row.begun_s, length: (to ?? now) - from, tokens }));
  return html`<${DataTable} caption=${t("fall.spans")} columns=${columns} rows=${rows} />`;
}

function StepsOf({ model, steps, onSteps }) {
  const kept = steps.map((index) => model.step(index)).filter(Boolean);
  const columns = [
    { key: "index", label: t("steps.index"), num: true, sort: true },
    { key: "total_ms", label: t("steps.ms"), num: true, sort: true, format: millis },
    { key: "model_ms", label: t("steps.model_ms"), num: true, sort: true, format: millis },
    { key: "decodes", label: t("steps.decodes"), num: true, sort: true, format: count },
    { key: "prefill_tokens", label: t("steps.prefill_tokens"), num: true, sort: true, format: count },
  ];
  return html`<div>
    <${DataTable} caption=${t("fall.steps", { count: steps.length, kept: kept.length })} columns=${columns} rows=${kept} rowKey=${(step) => step.index} empty=${t("live.none")} />
    ${kept.length > 0 && html`<button type="button" class="small" onClick=${() => onSteps([kept[0].index, kept[kept.length - 1].index + 1])}>${t("fall.show")}</button>`}
  </div>`;
}

/** @param {{model: any, path: string, row: any, onSteps: (range: [number, number]) => void}} props `row`: if the page knows it */
export function RequestDetail({ model, path, row, onSteps }) {
  const found = useRequest(path, row?.ended_s ?? null);
  const heading = useRef(null);
  const shown = row ?? (found?.spans ? found : null);
  useEffect(() => heading.current?.focus(), [path]);
  const close = () => { location.hash = "#/live"; };
  const body = shown
    ? html`<dl class="facts wide">
        <div><dt>${t("fall.age")}</dt><dd>${clock(model.unix(shown.begun_s))}</dd></div>
        ${FACTS.filter((key) => shown[key] != null).map((key) => html`<div key=${key}><dt>${t(`fall.${key}`)}</dt><dd>${shown[key]}</dd></div>`)}
      </dl>
      <div class="detail-grid"><${Spans} row=${shown} now=${model.serverNow()} />
        ${found?.steps && html`<${StepsOf} model=${model} steps=${found.steps[model.replica] ?? []} onSteps=${onSteps} />`}</div>
      ${TEXTS.filter((name) => found?.[name] != null).map((name) => html`<h4 key=${name}>${t(`fall.${name}`)}</h4><pre class="detail-text" tabindex="0" role="group" aria-label=${t(`fall.${name}`)}>${found[name]}</pre>`)}`
    : found?.error && html`<p>${t("fall.noone", { id: path })}</p>`;
  return html`<section class="detail" aria-label=${t("fall.detail", { name: path })} onKeyDown=${(event) => event.key === "Escape" && close()}>
    <div class="panel-head"><h3 tabindex="-1" ref=${heading}>${t("fall.detail", { name: shown ? nameOf(shown) : path })}</h3>
      <button type="button" class="small" onClick=${close}>${t("fall.close")}</button></div>
    ${body}
  </section>`;
}
