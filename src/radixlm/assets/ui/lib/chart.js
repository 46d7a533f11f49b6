/** Charts over uPlot: theme, patterns, zoom by drag, keyboard, resizing; and sparklines. */
import { html, useEffect, useRef } from "../vendor/preact.js";
import uPlot from "../vendor/uplot.js";
import { colour, fillOf, onTheme, paintSwatch } from "./theme.js";

/**
 * @typedef {{label: string, colour: string, kind?: "bars"|"area"|"line", pattern?: string,
 *   dash?: number[], format?: (value: number) => string}} Series `colour`: a CSS variable
 * @typedef {[number, number]|null} Range
 * @typedef {{series: Series[], data: ArrayLike<number>[], label: string, height?: number,
 *   stacked?: boolean, log?: boolean, xFormat?: (x: number) => string, yFormat?: (y: number) => string,
 *   sync?: string, range?: Range, onRange?: (range: Range) => void,
 *   onPick?: (index: number) => void, marked?: number|null, cap?: number}} ChartProps
 *   `data`: x, then one array a series, of equal length; `range`: x shown (null: all of it);
 *   `onPick`: a click or Enter at an index of the data; `marked`: x with a line through it; `cap`: y never reaches further
 */

const plain = (column) => Array.from(column, (value) => (Number.isNaN(value) ? null : value)); // null: a gap

/** Sums from the last series up, so that the first series lies on top. @param {ArrayLike<number>[]} data */
function stack(data) {
  const sums = data.map(plain);
  for (let line = sums.length - 2; line > 0; line -= 1) {
    for (let index = 0; index < sums[line].length; index += 1) {
      if (sums[line][index] !== null) sums[line][index] += sums[line + 1][index] ?? 0;
    }
  }
  return sums;
}

/** uPlot's description of one series. @param {Series} one @param {number} index @param {any} state */
function seriesOf(one, index, state) {
  const fill = (u) => fillOf(u.ctx, one.colour, one.pattern);
  const value = (u, plotted, line, at) => (at == null ? "–" : (one.format ?? String)(state.props.data[index + 1][at]));
  const common = { label: one.label, value, points: { show: false }, stroke: () => colour(one.colour), scale: "y" };
  if (one.kind === "bars") return { ...common, fill, width: 0, paths: uPlot.paths.bars({ size: [0.9, 40], align: 1 }) };
  if (one.kind === "area") return { ...common, fill, width: 1 };
  return { ...common, width: 1.5, dash: one.dash };
}

function axesOf(props) {
  const look = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const x = { ...look, size: 24, space: 70, values: (u, splits) => splits.map((at) => (props.xFormat ?? String)(at)), grid: { show: false } };
  const decades = (u, line, min, max) => [0, 1, 10, 100, 1e3, 1e4, 1e5, 1e6].filter((at) => at <= max);
  const y = { ...look, size: 52, space: 26, ...(props.log ? { splits: decades, filter: (u, splits) => splits } : {}), values: (u, splits) => splits.map((at) => (at == null ? "" : (props.yFormat ?? String)(at))) };
  return [x, y];
}

/** A vertical line at the marked x. */
function drawMark(u, marked) {
  if (marked == null) return;
  const left = Math.round(u.valToPos(marked, "x", true));
  if (!(left >= u.bbox.left && left <= u.bbox.left + u.bbox.width)) return;
  u.ctx.save();
  u.ctx.fillStyle = colour("fg");
  u.ctx.fillRect(left, u.bbox.top, Math.max(1, devicePixelRatio), u.bbox.height);
  u.ctx.restore();
}

/** @param {any} state @param {number} width */
function options(state, width) {
  const props = state.props;
  const select = (u) => {
    const { left, width: wide } = u.select;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (wide > 4) state.props.onRange?.([u.posToVal(left, "x"), u.posToVal(left + wide, "x")]);
  };
  const whole = (u, min, max) => state.props.range ?? (min == null ? [0, 1] : min === max ? [min, min + 1] : [min, max]);
  const tops = (u, min, max) => [0, max > 0 ? Math.min(max * 1.05, state.props.cap ?? Infinity) : 1];
  return {
    width, height: props.height ?? 160, padding: [6, 8, 0, 0],
    legend: { live: true },
    cursor: { drag: { x: true, y: false, setScale: false }, sync: props.sync ? { key: props.sync } : undefined, points: { show: false }, bind: { dblclick: () => () => { state.props.onRange?.(null); } } },
    scales: { x: { time: false, range: whole }, y: props.log ? { distr: 4, range: (u, min, max) => [0, Math.max(1, max) * 1.3] } : { range: tops } },
    axes: axesOf(props),
    series: [{ label: props.xLabel ?? "", value: (u, at) => (at == null ? "–" : (state.props.xFormat ?? String)(at)) }, ...props.series.map((one, index) => seriesOf(one, index, state))],
    hooks: { setSelect: [select], draw: [(u) => drawMark(u, state.props.marked)] },
  };
}

/** Patterns also in the legend's markers. */
function markLegend(plot, props) {
  plot.root.querySelectorAll(".u-legend .u-series").forEach((line, index) => {
    const one = props.series[index - 1];
    const marker = line.querySelector(".u-marker");
    if (!one || !marker) return;
    const swatch = document.createElement("canvas");
    swatch.width = swatch.height = 12;
    swatch.className = "u-marker";
    marker.replaceWith(swatch);
    paintSwatch(swatch, one.colour, one.kind === "line" || !one.kind ? undefined : one.pattern);
  });
}

/** Moves the cursor, zooms and picks by keys. @param {KeyboardEvent} event @param {any} state */
function onKey(event, state) {
  const { plot, props } = state;
  if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
  const xs = plot.data[0];
  const [min, max] = [plot.scales.x.min, plot.scales.x.max];
  const at = plot.cursor.idx ?? xs.length - 1;
  const move = (index) => {
    const held = Math.max(0, Math.min(xs.length - 1, index));
    const left = Math.max(0, plot.valToPos(xs[held], "x"));
    plot.setCursor({ left, top: plot.over.clientHeight / 2 });
  };
  const zoom = (factor) => {
    const centre = xs[at] ?? max;
    props.onRange?.([centre - (centre - min) * factor, centre + (max - centre) * factor]);
  };
  const page = Math.max(1, Math.round(xs.length / 20));
  const act = {
    ArrowLeft: () => move(at - 1), ArrowRight: () => move(at + 1), PageUp: () => move(at - page), PageDown: () => move(at + page),
    Home: () => move(0), End: () => move(xs.length - 1), "+": () => zoom(0.5), "=": () => zoom(0.5),
    "-": () => props.onRange?.(null), Escape: () => props.onRange?.(null), 0: () => props.onRange?.(null),
    Enter: () => plot.cursor.idx != null && props.onPick?.(plot.cursor.idx),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function build(state, box) {
  const plot = new uPlot(options(state, Math.max(160, box.clientWidth)), plotted(state.props), box);
  let down = null;
  plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    if (down !== null && Math.abs(event.clientX - down) < 4 && plot.cursor.idx != null) state.props.onPick?.(plot.cursor.idx);
  });
  markLegend(plot, state.props);
  return plot;
}

const plotted = (props) => (props.stacked ? stack(props.data) : props.data.map(plain));

/** @param {ChartProps} props */
export function Chart(props) {
  const box = useRef(null);
  const state = useRef({ plot: null, props }).current;
  state.props = props;
  useEffect(() => {
    state.plot = build(state, box.current);
    const sized = new ResizeObserver(() => state.plot.setSize({ width: Math.max(160, box.current.clientWidth), height: props.height ?? 160 }));
    sized.observe(box.current);
    const stop = onTheme(() => { state.plot.redraw(false, true); markLegend(state.plot, state.props); });
    return () => { stop(); sized.disconnect(); state.plot.destroy(); state.plot = null; };
  }, []);
  useEffect(() => { state.plot?.setData(plotted(props)); }, [props.data, props.range, props.marked]);
  return html`<div class="chart" ref=${box} tabindex="0" role="group" aria-label=${props.label} onKeyDown=${(event) => onKey(event, state)}></div>`;
}

/**
 * A line of recent values without axes; its figures are elsewhere, so it is hidden from readers.
 * @param {{values: ArrayLike<number>, colour?: string, max?: number}} props
 */
export function Sparkline({ values, colour: name = "accent", max }) {
  const length = values.length;
  let top = max ?? 0;
  // a full cache may have been larger than the one that an engine which restarts tells of
  for (let index = 0; index < length; index += 1) if (values[index] > top) top = values[index];
  let line = "";
  let pen = "M";
  for (let index = 0; index < length; index += 1) {
    if (!Number.isFinite(values[index])) { pen = "M"; continue; }
    const x = length > 1 ? (index * 100) / (length - 1) : 100;
    line += `${pen}${x.toFixed(1)} ${(23 - (22 * values[index]) / (top || 1)).toFixed(1)}`;
    pen = "L";
  }
  return html`<svg class="spark spark-${name}" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
    <path d=${line} vector-effect="non-scaling-stroke" />
  </svg>`;
}

/** A key of colours and patterns. @param {{entries: {label: string, colour: string, pattern?: string}[]}} props */
export function Legend({ entries }) {
  return html`<ul class="legend">
    ${entries.map((one) => html`<li key=${one.label}><${Swatch} ...${one} />${one.label}</li>`)}
  </ul>`;
}

function Swatch({ colour: name, pattern }) {
  const canvas = useRef(null);
  useEffect(() => {
    const paint = () => paintSwatch(canvas.current, name, pattern);
    paint();
    return onTheme(paint);
  }, [name, pattern]);
  return html`<canvas class="swatch" width="14" height="12" ref=${canvas} aria-hidden="true"></canvas>`;
}
