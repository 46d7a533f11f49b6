// The head of the live view: state, rates and latencies, each with ten minutes of history.
import { html } from "../vendor/preact.js";
import { t } from "../messages.js";
import { Sparkline } from "../lib/chart.js";
import { clock, count, percent, seconds } from "../lib/format.js";
import { DataTable, Twin } from "../lib/table.js";
import { Panel, useTopics } from "./live_parts.js";

const STATES = ["ready", "starting", "draining", "recovering", "paused", "released", "dead"];
const METRICS = ["ttft", "itl", "e2e"];
const WINDOWS = ["1m", "5m", "60m"];

function Tile({ label, value, note, values, colour, max }) {
  return html`<div class="tile">
    <dt>${label}</dt>
    <dd><span class="figure">${value}</span>${note && html`<span class="muted small">${note}</span>`}<${Sparkline} values=${values} colour=${colour} max=${max} /></dd>
  </div>`;
}

function Latency({ head, history }) {
  const rows = METRICS.map((name) => ({ name, at: head?.percentiles?.[name] ?? {} }));
  const cell = (window) => (value, row) => {
    const found = row.at[window];
    return found ? found.map((one) => seconds(one)).join(" · ") : "–";
  };
  const columns = [
    { key: "name", label: t("head.metric"), format: (name) => t(`head.${name}`) },
    ...WINDOWS.map((window) => ({ key: window, label: t(`head.${window}`), num: true, format: cell(window) })),
    { key: "trend", label: t("head.trend"), format: (_, row) => html`<${Sparkline} values=${history.get(row.name)} colour="accent" />` },
  ];
  return html`<${DataTable} caption=${t("head.latency")} columns=${columns} rows=${rows} rowKey=${(row) => row.name} />`;
}

/** The history as a table, newest first. */
function historyTable(model) {
  const { history } = model;
  const columns = [
    { key: "t", label: t("head.time"), format: (at) => clock(model.unix(at)) },
    ...[["running", "head.running", count], ["waiting", "head.waiting", count], ["in_per_s", "head.in", count], ["out_per_s", "head.out", count],
      ["kv_used", "memory.tokens", count], ["hit_rate", "head.hit", percent], ["ttft", "head.ttft95", seconds], ["itl", "head.itl95", seconds], ["e2e", "head.e2e95", seconds],
    ].map(([key, label, format]) => ({ key, label: t(label), num: true, format })),
  ];
  const rows = Array.from({ length: history.length }, (_, back) => Object.fromEntries(columns.map(({ key }) => [key, history.last(key, back)])));
  return { columns, rows };
}

/** @param {{model: import("./live_state.js").LiveModel}} props */
export function Head({ model }) {
  useTopics(model, ["head"], 2);
  const { head, history } = model;
  const state = STATES.includes(head?.state) ? head.state : "unknown";
  const share = head?.kv_total ? head.kv_used / head.kv_total : null;
  const summary = t("head.summary", { running: count(head?.running), waiting: count(head?.waiting), out: count(head?.out_per_s), kv: percent(share) });
  const tiles = [
    { label: t("head.running"), value: count(head?.running), values: history.get("running"), colour: "decode" },
    { label: t("head.waiting"), value: count(head?.waiting), values: history.get("waiting"), colour: "queue" },
    { label: t("head.in"), value: count(head?.in_per_s), values: history.get("in_per_s"), colour: "prefill" },
    { label: t("head.out"), value: count(head?.out_per_s), values: history.get("out_per_s"), colour: "decode" },
    { label: t("head.kv"), value: percent(share), note: `${count(head?.kv_used)} of ${count(head?.kv_total)}`, values: history.get("kv_used"), colour: "accent", max: head?.kv_total },
    { label: t("head.hit"), value: percent(head?.hit_rate), values: history.get("hit_rate"), colour: "cached", max: 1 },
  ];
  const where = html`<div class="live-state">
    <span class=${`badge state-${state}`}>${t(`state.${state}`)}</span>
    <span class="mono">${model.hello?.model ?? ""}</span>
    <span class="muted">${head ? t("head.uptime", { time: seconds(head.uptime_s) }) : ""}</span>
  </div>`;
  return html`<${Panel} id="live-head" title=${t("head.title")} tools=${where}>
    <${Twin} caption=${t("head.caption")} summary=${summary} label=${t("live.table")} table=${() => historyTable(model)}>
      <div class="head-body">
        <dl class="tiles">${tiles.map((tile) => html`<${Tile} key=${tile.label} ...${tile} />`)}</dl>
        <${Latency} head=${head} history=${history} />
      </div>
    </${Twin}>
  </${Panel}>`;
}
