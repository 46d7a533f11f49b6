// The tree view: the prefix cache as an icicle, hot prefixes, search by prompt.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { t } from "../messages.js";
import "./live_messages.js";
import "./tree_messages.js";
import { bytes, count, percent, seconds } from "../lib/format.js";
import { DataTable, Twin } from "../lib/table.js";
import { reducedMotion } from "../lib/theme.js";
import { Panel, useTopics } from "./live_parts.js";
import { heat, neighbour, TreeModel } from "./tree_layout.js";

export const title = "Tree";
export const model = new TreeModel();

const ROW = 26;
const HOT = 50;
const GHOST_MS = 1200;
const clipped = (text, most) => (text.length > most ? `${text.slice(0, most)}…` : text);
const labelOf = (node) => (node.text !== null ? clipped(node.text, 80) : `#${node.serial}`);

/** @param {import("./tree_layout.js").Node} node */
const spoken = (node) => t("tree.item", { name: labelOf(node), tokens: count(node.tokens), path: node.path, hits: node.hits, rate: count(node.rate), locked: node.locks ? t("tree.locked") : "", tomb: node.isTombstone ? t("tree.tombs") : "" });

/** What fits of a node's name; always a part of what is spoken. */
function shownName(node, wide) {
  const room = Math.floor((wide - 8) / 6.4);
  const name = labelOf(node);
  const whole = `${name} · ${count(node.tokens)}`;
  if (whole.length <= room) return whole;
  return name.length <= room ? name : node.text !== null && room > 3 ? name.slice(0, room) : "";
}

function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const sized = new ResizeObserver(([entry]) => setWidth(Math.max(200, Math.floor(entry.contentRect.width))));
    sized.observe(box.current);
    return () => sized.disconnect();
  }, []);
  return /** @type {const} */ ([box, width]);
}

function Item({ node, x, wide, state, on }) {
  const text = shownName(node, wide);
  const marks = `${state.marked.has(node.serial) ? " marked" : ""}${node.isTombstone ? " tomb" : ""}`;
  return html`<g role="treeitem" aria-level=${node.depth + 1} aria-label=${spoken(node)} aria-selected=${state.focus === node.serial ? "true" : "false"}
      tabindex=${state.focus === node.serial ? 0 : -1} data-serial=${node.serial} class="node" onClick=${() => on.focus(node)} onDblClick=${() => on.zoom(node)} onFocus=${() => on.focus(node)}>
    <rect class=${`heat-${heat(node.rate)}${marks}`} x=${x} y=${node.depth * ROW + 1} width=${Math.max(1, wide - 1)} height=${ROW - 2} rx="2" />
    ${node.locks > 0 && html`<rect class="hatch" x=${x} y=${node.depth * ROW + 1} width=${Math.max(1, wide - 1)} height=${ROW - 2} fill="url(#tree-hatch)" />`}
    ${text && html`<text class=${`ink-${heat(node.rate)}`} x=${x + 5} y=${node.depth * ROW + ROW / 2 + 4}>${text}</text>`}
  </g>`;
}

/** Nodes that were evicted light up where they were. */
function Ghosts({ nodes, xOf }) {
  const [shown, setShown] = useState(/** @type {any[]} */ ([]));
  useEffect(() => {
    if (!nodes.length || reducedMotion()) return undefined;
    setShown(nodes);
    const timer = setTimeout(() => setShown([]), GHOST_MS);
    return () => clearTimeout(timer);
  }, [nodes]);
  return shown.map((node) => html`<rect key=${node.serial} class="gone" x=${xOf(node.from)} y=${node.depth * ROW + 1} width=${Math.max(2, xOf(node.from + node.total) - xOf(node.from))} height=${ROW - 2} />`);
}

function Icicle({ tree, gone, zoomed, state, on }) {
  const [box, width] = useWidth();
  const top = zoomed ?? { from: 0, total: tree.total };
  const xOf = (tokens) => ((tokens - top.from) / top.total) * width;
  const shown = tree.order.filter((node) => xOf(node.from + node.total) > 0 && xOf(node.from) < width);
  const rest = xOf(tree.total - tree.rest.tokens);
  const high = Math.max(...shown.map((node) => node.depth + 1), 1) * ROW;
  const key = (event) => on.key(event, box.current);
  // a node that is moved among its siblings loses the focus
  const had = box.current?.contains(document.activeElement);
  useLayoutEffect(() => { if (had && document.activeElement === document.body) box.current.querySelector(`[data-serial="${state.focus}"]`)?.focus(); });
  return html`<div class="icicle" ref=${box} onKeyDown=${key}>
    <svg role="tree" aria-label=${t("tree.label")} width=${width} height=${high} viewBox=${`0 0 ${width} ${high}`}>
      <defs><pattern id="tree-hatch" width="8" height="8" patternUnits="userSpaceOnUse"><path class="hatch-ink" d="M-2 6 6 -2M2 10 10 2" /></pattern></defs>
      ${shown.map((node) => {
        const left = Math.max(0, xOf(node.from));
        return html`<${Item} key=${node.serial} node=${node} x=${left} wide=${Math.min(width, xOf(node.from + node.total)) - left} state=${state} on=${on} />`;
      })}
      ${tree.rest.nodes > 0 && rest < width && html`<g role="treeitem" aria-level="1" aria-label=${t("tree.more", { nodes: count(tree.rest.nodes), tokens: count(tree.rest.tokens) })} class="rest">
        <rect x=${Math.max(0, rest)} y="1" width=${Math.max(1, width - Math.max(0, rest) - 1)} height=${ROW - 2} rx="2" />
        ${width - rest > 120 && html`<text x=${Math.max(0, rest) + 5} y=${ROW / 2 + 4}>${t("tree.more", { nodes: count(tree.rest.nodes), tokens: count(tree.rest.tokens) })}</text>`}
      </g>`}
      <${Ghosts} nodes=${gone} xOf=${xOf} />
    </svg>
  </div>`;
}

function columnsOf(tree, bytesPerToken) {
  const saved = Math.max(1, tree.order.reduce((sum, node) => sum + node.tokens * node.hits, 0));
  const figure = (key, format = count) => ({ key, label: t(`tree.${key}`), num: true, sort: true, format });
  return {
    serial: { key: "serial", label: t("tree.node"), format: (_, node) => labelOf(node) }, depth: figure("depth", (depth) => depth + 1), tokens: figure("tokens"), path: figure("path"), hits: figure("hits"), rate: figure("rate"), locks: figure("locks"),
    age_s: { key: "age_s", label: t("tree.age"), num: true, sort: true, format: (age) => t("fall.ago", { time: seconds(age) }) },
    bytes: { key: "bytes", label: t("tree.bytes"), num: true, format: (_, node) => bytes(bytesPerToken === null ? null : node.tokens * bytesPerToken) },
    share: { key: "share", label: t("tree.share"), num: true, format: (_, node) => percent((node.tokens * node.hits) / saved) },
    isTombstone: { key: "isTombstone", label: t("tree.tomb"), format: (is) => t(is ? "tree.yes" : "tree.no") },
  };
}

/** Bytes of one cached token, from what the server says of its pool; null where it does not. */
function useBytes() {
  const [found, setFound] = useState(/** @type {number|null} */ (null));
  useEffect(() => {
    const stop = new AbortController();
    const read = (info) => {
      const state = info.internal_states?.[0] ?? {};
      const [gib, tokens] = [state.memory_usage?.kvcache, info.max_total_num_tokens ?? state.memory_usage?.token_capacity];
      if (gib > 0 && tokens > 0) setFound((gib * 2 ** 30) / tokens);
    };
    api("server_info", { quiet: true, signal: stop.signal }).then(read, () => {});
    return () => stop.abort();
  }, []);
  return found;
}

function Search({ onFound }) {
  const [text, setText] = useState("");
  const [answer, setAnswer] = useState("");
  const find = async (event) => {
    event.preventDefault();
    try {
      const { path, tokens } = await api(`live/tree?text=${encodeURIComponent(text)}`);
      setAnswer(tokens ? t("tree.found", { tokens: count(tokens), nodes: path.length }) : t("tree.nothing"));
      onFound(new Set(path));
    } catch (error) {
      setAnswer(error.message);
      onFound(new Set());
    }
  };
  const clear = () => { setText(""); setAnswer(""); onFound(new Set()); };
  return html`<form class="tree-search" role="search" onSubmit=${find}>
    <label for="tree-text">${t("tree.search")}</label><input id="tree-text" value=${text} onInput=${(event) => setText(event.target.value)} required />
    <button class="small">${t("tree.find")}</button>${answer && html`<button type="button" class="small" onClick=${clear}>${t("tree.clear")}</button>`}
    <span role="status" class="muted small">${answer}</span>
  </form>`;
}

function Key() {
  return html`<ul class="legend">
    ${[0, 1, 2, 3, 4, 5].map((step) => html`<li key=${step}><svg class="swatch" width="14" height="12" aria-hidden="true"><rect class=${`heat-${step}`} width="14" height="12" /></svg>${t(`tree.heat${step}`)}</li>`)}
    ${["hatch", "dashed", "marked"].map((name) => html`<li key=${name}>${t(`tree.${name}`)}</li>`)}
  </ul>`;
}

/** Focus, zoom and marks of the icicle, and what keys do. */
function useIcicle(tree) {
  const [focus, setFocus] = useState(/** @type {number|null} */ (null));
  const [zoom, setZoom] = useState(/** @type {number|null} */ (null));
  const zoomed = (zoom !== null && tree?.nodes.get(zoom)) || null;
  const focused = (focus !== null && tree?.nodes.get(focus)) || tree?.roots[0] || null;
  const key = (event, box) => {
    if (!focused || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = event.key.startsWith("Arrow");
    if (!moves && event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    if (event.key === "Enter") setZoom(focused.serial);
    else if (event.key === "Escape") setZoom((now) => tree.nodes.get(now)?.up?.serial ?? null);
    else {
      const next = neighbour(tree, focused, event.key);
      setFocus(next.serial);
      box.querySelector(`[data-serial="${next.serial}"]`)?.focus();
    }
  };
  const on = { key, focus: (node) => setFocus(node.serial), zoom: (node) => setZoom(node.serial) };
  return { zoomed, focused, on, whole: () => setZoom(null) };
}

/** @param {{store: any}} props */
export default function View({ store }) {
  const [marked, setMarked] = useState(new Set());
  useTopics(model, ["tree"], 2);
  useEffect(() => store.subscribe(["tree"], (topic, data) => model.apply(topic, data)), [store]);
  const bytesPerToken = useBytes();
  const { tree } = model;
  const icicle = useIcicle(tree);
  const columns = tree && columnsOf(tree, bytesPerToken);
  const summary = tree ? t("tree.summary", { tokens: count(model.totalTokens), nodes: count(tree.order.length + tree.rest.nodes), depth: tree.depth, locked: tree.order.filter((node) => node.locks).length }) : t("tree.wait");
  const table = () => ({ columns: [columns.serial, columns.depth, columns.tokens, columns.path, columns.hits, columns.rate, columns.locks, columns.age_s, columns.isTombstone], rows: tree?.order ?? [], rowKey: (node) => node.serial });
  const hot = tree && [...tree.order].sort((one, two) => two.hits - one.hits).slice(0, HOT);
  const tools = icicle.zoomed && html`<button type="button" class="small" onClick=${icicle.whole}>${t("tree.back")}</button>`;
  return html`<div class="live tree">
    <h1 class="visually-hidden">${t("tree.title")}</h1>
    <${Panel} id="tree-panel" title=${t("tree.title")} tools=${html`<${Search} onFound=${setMarked} />`}>
      <${Twin} caption=${t("tree.caption")} summary=${summary} label=${t("live.table")} tools=${tools} table=${table}>
        <${Key} />
        ${tree?.order.length ? html`<${Icicle} tree=${tree} gone=${model.gone} zoomed=${icicle.zoomed} state=${{ focus: icicle.focused?.serial, marked }} on=${icicle.on} />` : tree && html`<p class="muted">${t("tree.empty")}</p>`}
        ${icicle.focused && html`<p class="tree-focus small">${spoken(icicle.focused)}</p>`}
      </${Twin}>
    </${Panel}>
    ${hot?.length ? html`<${Panel} id="tree-hot" title=${t("tree.hot")}>
      <${DataTable} caption=${t("tree.hot")} hideCaption=${true} rows=${hot} rowKey=${(node) => node.serial} columns=${[columns.serial, columns.tokens, columns.path, columns.hits, columns.rate, columns.age_s, columns.bytes, columns.share, columns.locks]} />
    </${Panel}>` : null}
  </div>`;
}
