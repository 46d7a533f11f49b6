// Memory: whose the pages of the KV pool are, now and over ten minutes.
import { html } from "../vendor/preact.js";
import { t } from "../messages.js";
import { Chart, Legend } from "../lib/chart.js";
import { clock, count, percent } from "../lib/format.js";
import { Twin } from "../lib/table.js";
import { Panel, useTopics } from "./live_parts.js";

export const OWNERS = [
  { name: "running", colour: "decode", pattern: undefined }, { name: "cached_locked", colour: "prefill", pattern: "slant" },
  { name: "cached_free", colour: "cached", pattern: "dots" }, { name: "free", colour: "page-free", pattern: undefined },
];
const RATES = ["retracted_per_s", "evicted_per_s"];

/** One bar whose parts are as wide as their share; drawn by attributes, so that no style is needed. */
function Strip({ parts, total, label }) {
  let left = 0;
  return html`<svg class="strip" viewBox="0 0 1000 28" preserveAspectRatio="none" role="img" aria-label=${label}>
    <defs><pattern id="strip-slant" width="8" height="8" patternUnits="userSpaceOnUse"><path class="strip-ink" d="M-2 6 6 -2M2 10 10 2" /></pattern>
      <pattern id="strip-dots" width="8" height="8" patternUnits="userSpaceOnUse"><path class="strip-ink" d="M1 2H3M5 6H7" /></pattern></defs>
    ${parts.map(({ name, pattern, pages }) => {
      const wide = total ? (1000 * pages) / total : 0;
      const x = left;
      left += wide;
      return html`<g key=${name}><rect class=${`page-${name}`} x=${x} width=${wide} height="28" />${pattern && html`<rect x=${x} width=${wide} height="28" fill=${`url(#strip-${pattern})`} />`}</g>`;
    })}
  </svg>`;
}

function Pool({ pages }) {
  const parts = OWNERS.map((owner) => ({ ...owner, pages: pages[owner.name] ?? 0 }));
  const text = t("memory.summary", { used: count(pages.total - pages.free), total: count(pages.total), size: pages.size, free: count(pages.free) });
  const columns = [
    { key: "name", label: t("memory.owner"), format: (name) => t(`memory.${name}`) }, { key: "pages", label: t("memory.pages"), num: true },
    { key: "tokens", label: t("memory.tokens"), num: true, format: (_, part) => part.pages * pages.size }, { key: "share", label: t("memory.share"), num: true, format: (_, part) => percent(part.pages / pages.total) },
  ];
  const window = pages.window_total ? [{ name: "window", pages: pages.window }] : [];
  const extra = pages.window_total ? html`<p class="small">${t("memory.window")}: ${count(pages.window)} / ${count(pages.window_total)}</p>` : null;
  const states = pages.states_total ? html`<p class="small">${t("memory.states", { used: count(pages.states_used), total: count(pages.states_total) })}</p>` : null;
  return html`<${Twin} caption=${t("memory.strip")} summary=${text} label=${t("live.table")} table=${() => ({ columns, rows: [...parts, ...window] })}>
    <${Strip} parts=${parts} total=${pages.total} label=${text} />
    <${Legend} entries=${OWNERS.map((owner) => ({ label: `${t(`memory.${owner.name}`)} ${count(pages[owner.name])}`, colour: owner.colour, pattern: owner.pattern }))} />
    ${extra}${states}
  </${Twin}>`;
}

const timeColumn = (model) => ({ key: "t", label: t("head.time"), format: (at) => clock(model.unix(at)) });
const linesOf = (history, keys) => Array.from({ length: history.length }, (_, back) => Object.fromEntries(["t", ...keys].map((key) => [key, history.last(key, back)])));
const copies = (history, keys) => ["t", ...keys].map((key) => history.get(key).slice());

function History({ model }) {
  const { history } = model;
  const owners = OWNERS.filter((owner) => owner.name !== "free").reverse();
  const keys = owners.map((owner) => `pages_${owner.name}`);
  const columns = [timeColumn(model), ...owners.map((owner) => ({ key: `pages_${owner.name}`, label: t(`memory.${owner.name}`), num: true, format: count }))];
  const series = owners.map((owner) => ({ label: t(`memory.${owner.name}`), kind: "area", colour: owner.colour, pattern: owner.pattern, format: count }));
  return html`<${Twin} caption=${t("memory.history")} summary=${t("memory.history")} label=${t("live.table")} table=${() => ({ columns, rows: linesOf(history, keys) })}>
    <${Chart} label=${t("memory.history")} series=${series} stacked=${true} height=${130} data=${copies(history, keys)} xFormat=${(at) => clock(model.unix(at))} xLabel=${t("head.time")} yFormat=${count} />
  </${Twin}>`;
}

function Rates({ model }) {
  const { history, head } = model;
  const names = { retracted_per_s: t("memory.retracted"), evicted_per_s: t("memory.evicted") };
  const series = [{ label: names.retracted_per_s, colour: "retracted", kind: "line", format: count }, { label: names.evicted_per_s, colour: "grammar", kind: "line", dash: [4, 3], format: count }];
  const columns = [timeColumn(model), ...RATES.map((key) => ({ key, label: names[key], num: true, format: count }))];
  const text = t("memory.ratesum", { retracted: count(head?.retracted), evicted: count(head?.evicted) });
  return html`<${Twin} caption=${t("memory.rates")} summary=${text} label=${t("live.table")} table=${() => ({ columns, rows: linesOf(history, RATES) })}>
    <${Chart} label=${t("memory.rates")} series=${series} height=${130} data=${copies(history, RATES)} xFormat=${(at) => clock(model.unix(at))} xLabel=${t("head.time")} yFormat=${count} />
  </${Twin}>`;
}

/** @param {{model: import("./live_state.js").LiveModel}} props */
export function Memory({ model }) {
  useTopics(model, ["head"], 1);
  const pages = model.head?.pages;
  return html`<${Panel} id="live-memory" title=${t("memory.title")} wide=${true}>
    ${pages ? html`<${Pool} pages=${pages} />` : html`<p class="muted">${t("live.none")}</p>`}
    <div class="memory-charts"><${History} model=${model} /><${Rates} model=${model} /></div>
  </${Panel}>`;
}
