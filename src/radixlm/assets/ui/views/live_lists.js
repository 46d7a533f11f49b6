// Deaths and recoveries, speculation, adapters, replicas and the log of the live view.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { t } from "../messages.js";
import { clock, count, percent, seconds } from "../lib/format.js";
import { DataTable, Twin } from "../lib/table.js";
import { Panel, useTopics } from "./live_parts.js";

/** "3: 0.9 s to 1.4 s, 1 not yet". @param {any} death */
function wentOn(death) {
  const times = death.went_on.map(([, passed]) => passed);
  const parts = times.length ? [t("deaths.range", { count: times.length, least: seconds(Math.min(...times)), most: seconds(Math.max(...times)) })] : [];
  if (death.held > times.length) parts.push(t("deaths.pending", { count: death.held - times.length }));
  return parts.join(", ") || "–";
}

export function Deaths({ model }) {
  useTopics(model, ["deaths"], 2);
  const columns = [
    { key: "t", label: t("deaths.when"), format: (at) => clock(model.unix(at)) },
    { key: "why", label: t("deaths.why"), text: true },
    { key: "held", label: t("deaths.held"), num: true },
    { key: "went_on", label: t("deaths.went_on"), format: (_, death) => wentOn(death) },
    { key: "dump", label: t("deaths.dump"), text: true },
  ];
  return html`<${Panel} id="live-deaths" title=${t("deaths.title")}>
    <${DataTable} caption=${t("deaths.title")} hideCaption=${true} columns=${columns} rows=${model.deaths} empty=${t("deaths.none")} rowKey=${(death) => death.t} />
  </${Panel}>`;
}

function Bars({ counts }) {
  const most = Math.max(1, ...counts);
  return html`<svg class="bars" viewBox=${`0 0 ${counts.length * 20} 64`} preserveAspectRatio="none" role="img" aria-label=${t("spec.caption")}>
    ${counts.map((value, index) => html`<rect key=${index} class="bar" x=${index * 20 + 2} width="16" y=${60 - (56 * value) / most} height=${4 + (56 * value) / most} />`)}
  </svg>`;
}

export function Speculation({ model }) {
  useTopics(model, ["head"], 1);
  const found = model.head?.speculation;
  if (!found) return html`<${Panel} id="live-spec" title=${t("spec.title")}><p class="muted">${t("spec.none")}</p></${Panel}>`;
  const counts = found.accept_histogram ?? [];
  const table = () => ({ columns: [{ key: "n", label: t("spec.accepted"), num: true }, { key: "times", label: t("spec.times"), num: true, format: count }], rows: counts.map((times, n) => ({ n, times })) });
  const summary = t("spec.summary", { drafter: found.drafter ?? "–", rate: percent(found.accept_rate) });
  return html`<${Panel} id="live-spec" title=${t("spec.title")}>
    <${Twin} caption=${t("spec.caption")} summary=${summary} label=${t("live.table")} table=${table}><${Bars} counts=${counts} /></${Twin}>
  </${Panel}>`;
}

export function Adapters({ model }) {
  useTopics(model, ["head"], 1);
  const columns = [{ key: "name", label: t("adapters.name"), text: true }, { key: "pinned", label: t("adapters.pinned"), format: (is) => t(is ? "adapters.yes" : "adapters.no") }, { key: "requests", label: t("adapters.requests"), num: true, format: count }];
  return html`<${Panel} id="live-adapters" title=${t("adapters.title")}>
    <${DataTable} caption=${t("adapters.title")} hideCaption=${true} columns=${columns} rows=${model.head?.adapters ?? []} empty=${t("adapters.none")} rowKey=${(row) => row.name} />
  </${Panel}>`;
}

/** One card a replica: whatever figures and names it reports. */
export function Replicas({ model }) {
  useTopics(model, ["head"], 1);
  const cards = model.head?.replicas ?? [];
  const plain = (value) => ["number", "string", "boolean"].includes(typeof value);
  const card = (one, index) => html`<li class="card" key=${index}><h3>${t("replicas.name")} ${one.index ?? index}</h3>
    <dl class="facts">${Object.entries(one).filter(([key, value]) => key !== "index" && plain(value)).map(([key, value]) => html`<div key=${key}><dt>${key.replaceAll("_", " ")}</dt><dd class="num">${typeof value === "number" ? count(value) : String(value)}</dd></div>`)}</dl></li>`;
  return html`<${Panel} id="live-replicas" title=${t("replicas.title")}>
    ${cards.length ? html`<ul class="cards">${cards.map(card)}</ul>` : html`<p class="muted">${t("replicas.none")}</p>`}
  </${Panel}>`;
}

const LEVELS = ["", "INFO", "WARNING", "ERROR"];
const SEVERITY = { DEBUG: 0, INFO: 1, WARNING: 2, ERROR: 3, CRITICAL: 4 };
const severity = (level) => SEVERITY[String(level).toUpperCase()] ?? 1;

export function Log({ model }) {
  const [filter, setFilter] = useState("");
  const [level, setLevel] = useState("");
  const [held, setHeld] = useState(/** @type {any[]|null} */ (null));
  const box = useRef(null);
  useTopics(model, ["log"], 4);
  const lines = held ?? model.log;
  const wanted = filter.toLowerCase();
  const shown = lines.filter(([, itsLevel, source, text]) => (!level || severity(itsLevel) >= severity(level)) && (!wanted || `${source} ${text}`.toLowerCase().includes(wanted)));
  useEffect(() => {
    const at = box.current;
    if (!held && at && at.scrollHeight - at.scrollTop - at.clientHeight < 200) at.scrollTop = at.scrollHeight;
  }, [shown.length, lines]);
  const tools = html`<div class="tools">
    <label>${t("log.filter")} <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
    <label>${t("log.level")} <select value=${level} onChange=${(event) => setLevel(event.target.value)}>${LEVELS.map((one) => html`<option key=${one} value=${one}>${one || t("log.all")}</option>`)}</select></label>
    <button type="button" class="small" aria-pressed=${held ? "true" : "false"} onClick=${() => setHeld(held ? null : [...model.log])}>${t("log.pause")}</button>
  </div>`;
  return html`<${Panel} id="live-log" title=${t("log.title")} tools=${tools}>
    <p class="summary">${t("log.summary", { shown: shown.length, count: lines.length })}</p>
    <div class="log-lines" ref=${box} tabindex="0" role="region" aria-label=${t("log.label")}>
      ${shown.length ? shown.map(([at, itsLevel, source, text], index) => html`<div key=${index} class=${`log-line log-${severity(itsLevel)}`}><time>${clock(model.unix(at))}</time> <b>${itsLevel}</b> <span class="muted">${source}</span> <span>${text}</span></div>`) : html`<p class="muted">${t("log.none")}</p>`}
    </div>
  </${Panel}>`;
}
