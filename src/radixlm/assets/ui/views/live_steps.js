// The last steps of the engine: where their time goes, what they compute.
import { html, useEffect, useState } from "../vendor/preact.js";
import { t } from "../messages.js";
import { Chart } from "../lib/chart.js";
import { count, millis, percent } from "../lib/format.js";
import { DataTable, Twin } from "../lib/table.js";
import { nameOf, Panel, useTopics } from "./live_parts.js";
import { Profile } from "./live_profile.js";
import { STEP_PHASES } from "./live_state.js";
import { open, phasesText } from "./live_waterfall.js";

const PHASE_LOOKS = {
  plan_ms: { colour: "step-plan", pattern: "dots" }, prepare_ms: { colour: "step-prepare", pattern: "slant" }, model_ms: { colour: "step-model" },
  sample_ms: { colour: "step-sample", pattern: "back" }, commit_ms: { colour: "step-commit", pattern: "cross" }, wait_ms: { colour: "step-wait", pattern: "lines" },
};
const TOKEN_LOOKS = {
  budget: { colour: "muted", dash: [2, 4] }, prefill_tokens: { colour: "prefill" }, decodes: { colour: "decode", dash: [8, 3] }, forced: { colour: "grammar", dash: [3, 2] },
};
// on top what takes least
const STACK = ["wait_ms", "commit_ms", "sample_ms", "plan_ms", "prepare_ms", "model_ms"];
const TOKENS = Object.keys(TOKEN_LOOKS);
const TABLE = ["index", "total_ms", ...STEP_PHASES, "decodes", "prefill_tokens", "forced", "accepted", "budget", "free_pages", "retracted", "evicted"];

const TIME_SERIES = STACK.map((name) => ({ label: t(`steps.${name}`), kind: "bars", format: millis, ...PHASE_LOOKS[name] }));
const TOKEN_SERIES = TOKENS.map((name) => ({ label: t(`steps.${name}`), kind: "line", format: count, ...TOKEN_LOOKS[name] }));

/** Copies of the columns, so that they stay while the engine goes on. @param {import("./live_state.js").Columns} steps */
const copied = (steps) => Object.fromEntries(steps.names.map((name) => [name, steps.get(name).slice()]));

/** @param {Record<string, Float64Array>} columns */
function summary(columns) {
  const totals = columns.total_ms.slice().sort();
  if (!totals.length) return t("steps.none");
  let [all, inModel] = [0, 0];
  for (let at = 0; at < totals.length; at += 1) {
    all += columns.total_ms[at];
    inModel += columns.model_ms[at] || 0;
  }
  return t("steps.summary", { count: totals.length, median: millis(totals[totals.length >> 1]), longest: millis(totals[totals.length - 1]), busy: percent(all ? inModel / all : 0) });
}

/** Newest first. */
function stepsTable(columns, onPick) {
  const label = (name) => (name === "index" ? t("steps.index") : name === "total_ms" ? t("steps.ms") : t(`steps.${name}`));
  const format = (name) => (name === "index" ? String : name.endsWith("_ms") ? millis : count);
  const rows = Array.from(columns.index, (_, at) => Object.fromEntries([["at", at], ...TABLE.map((name) => [name, columns[name][at]])])).reverse();
  return { columns: TABLE.map((name) => ({ key: name, label: label(name), num: true, sort: true, format: format(name) })), rows, empty: t("steps.none"), onRow: (row) => onPick(row.at), rowLabel: (row) => t("steps.picked", { index: row.index, ms: millis(row.total_ms) }) };
}

function Picked({ model, step, onDone }) {
  const now = model.serverNow();
  const columns = [
    { key: "id", label: t("fall.request"), format: (_, row) => nameOf(row) }, { key: "phases", label: t("fall.phases"), text: true, format: (_, row) => phasesText(row, now) },
    { key: "prompt", label: t("fall.prompt"), num: true, format: count }, { key: "out", label: t("fall.out"), num: true, format: count },
  ];
  const facts = [...STEP_PHASES.map((name) => [name, millis(step[name])]), ...["decodes", "prefill_tokens", "forced", "accepted", "budget", "free_pages"].map((name) => [name, count(step[name])])];
  return html`<section class="detail" aria-label=${t("steps.items")} onKeyDown=${(event) => event.key === "Escape" && onDone()}>
    <div class="panel-head"><h3 role="status">${t("steps.picked", { index: step.index, ms: millis(step.total_ms) })}</h3><button type="button" class="small" onClick=${onDone}>${t("steps.go")}</button></div>
    <dl class="facts wide">${facts.map(([name, value]) => html`<div key=${name}><dt>${t(`steps.${name}`)}</dt><dd>${value}</dd></div>`)}</dl>
    <${DataTable} caption=${t("steps.items")} columns=${columns} rows=${model.during(step)} empty=${t("live.none")} onRow=${(row) => open(row.id)} rowLabel=${nameOf} rowKey=${(row) => row.id} />
  </section>`;
}

/** Where bars are cut, so that one long step does not flatten the others; Infinity: nowhere. @param {Float64Array} totals */
function capOf(totals) {
  const sorted = totals.slice().sort();
  const usual = 4 * (sorted[Math.floor(sorted.length * 0.95)] || 0);
  return usual && sorted[sorted.length - 1] > 2 * usual ? usual : Infinity;
}

function Charts({ columns, held, range, setRange, pick }) {
  const x = columns.index;
  const cap = capOf(columns.total_ms);
  const title = t("steps.time", { count: x.length }) + (cap < Infinity ? t("steps.cut", { ms: millis(cap) }) : "");
  const common = { sync: "steps", range, onRange: setRange, onPick: pick, marked: held?.step.index, xFormat: (at) => String(Math.round(at)), xLabel: t("steps.index") };
  return html`<div class="steps-charts">
    <p class="chart-title">${title}</p>
    <${Chart} ...${common} label=${`${t("steps.time", { count: x.length })}. ${t("steps.hint")}`} series=${TIME_SERIES} stacked=${true} height=${190} cap=${cap}
      data=${[x, ...STACK.map((name) => columns[name])]} yFormat=${(ms) => `${Number(ms.toPrecision(3))} ms`} />
    <p class="chart-title">${t("steps.tokens")}</p>
    <${Chart} ...${common} label=${t("steps.tokens")} series=${TOKEN_SERIES} log=${true} height=${120}
      data=${[x, ...TOKENS.map((name) => columns[name])]} yFormat=${count} />
    <p class="muted small">${t("steps.hint")}</p>
  </div>`;
}

/** @param {{model: import("./live_state.js").LiveModel, focused: [number, number]|null}} props `focused`: steps to show, asked for elsewhere */
export function Steps({ model, focused }) {
  const [range, setRange] = useState(/** @type {[number, number]|null} */ (null));
  const [held, setHeld] = useState(/** @type {any} */ (null));
  useTopics(model, ["steps"], 5);
  const columns = held?.columns ?? copied(model.steps);
  useEffect(() => {
    if (!focused) return;
    setHeld((before) => before ?? { columns: copied(model.steps), step: model.step(focused[0]) ?? { index: focused[0] } });
    setRange([focused[0] - 1, focused[1] + 1]);
    document.getElementById("live-steps")?.scrollIntoView({ block: "nearest" });
  }, [focused]);
  const pick = (at) => setHeld({ columns, step: Object.fromEntries(model.steps.names.map((name) => [name, columns[name][at]])) });
  const go = () => { setHeld(null); setRange(null); };
  const replicas = [...model.replicas.keys()].sort();
  const change = (event) => { model.replica = Number(event.target.value); go(); };
  const tools = html`${replicas.length > 1 && html`<label>${t("replicas.name")} <select value=${model.replica} onChange=${change}>${replicas.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`}
    ${range && html`<button type="button" class="small" onClick=${() => setRange(null)}>${t("steps.whole")}</button>`}`;
  return html`<${Panel} id="live-steps" title=${t("steps.title")} tools=${html`<${Profile} />`}>
    <${Twin} caption=${t("steps.title")} summary=${summary(columns)} label=${t("live.table")} tools=${tools} table=${() => stepsTable(columns, pick)}>
      <${Charts} columns=${columns} held=${held} range=${range} setRange=${setRange} pick=${pick} />
    </${Twin}>
    ${held && html`<${Picked} model=${model} step=${held.step} onDone=${go} />`}
  </${Panel}>`;
}
