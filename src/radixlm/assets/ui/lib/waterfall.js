/** Lives of requests on a canvas: one row a request, time to the right. Drawing only; no DOM around it. */
import { colour, fillOf } from "./theme.js";

/** Look of each phase: colour and pattern. */
export const PHASES = {
  queue: { colour: "queue", pattern: undefined },
  grammar: { colour: "grammar", pattern: "posts" },
  prefix_wait: { colour: "queue", pattern: "slant" },
  prefill: { colour: "prefill", pattern: undefined },
  cached: { colour: "cached", pattern: undefined },
  decode: { colour: "decode", pattern: undefined },
  retracted: { colour: "retracted", pattern: "back" },
  engine_dead: { colour: "dead", pattern: "cross" },
};

export const AXIS = 22; // pixels of the time axis on top
const FONT = "11px system-ui, sans-serif";

/**
 * @typedef {import("../views/live_state.js").Row} Row
 * @typedef {{width: number, height: number, rowHeight: number, top: number, gutter: number, from: number, to: number,
 *   now: number, rows: Row[], focus: number, hover: number, opened: string|null, slow: Slow|null,
 *   nameOf: (row: Row) => string, phaseNames: Record<string, string>}} Scene
 *   sizes in CSS pixels; `top`: scrolled pixels; `from`, `to`, `now`: seconds of the server's clock; `focus`, `hover`: rows, or -1
 * @typedef {{from: number, to: number, strip: HTMLCanvasElement}} Slow
 */

/** Steps of a time axis: 1, 2, 5 x 10^n seconds. @param {number} span seconds @param {number} most ticks */
export function tickStep(span, most) {
  const rough = span / Math.max(1, most);
  const scale = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((one) => one * scale).find((one) => one >= rough) ?? 10 * scale;
}

/** Pixels of a time. @param {Scene} scene @param {number} at */
export const xOf = (scene, at) => scene.gutter + ((at - scene.from) / (scene.to - scene.from)) * (scene.width - scene.gutter);
/** Time of a pixel. @param {Scene} scene @param {number} x */
export const timeOf = (scene, x) => scene.from + ((x - scene.gutter) / (scene.width - scene.gutter)) * (scene.to - scene.from);

/** The row under a pixel, or -1. @param {Scene} scene @param {number} y */
export function rowAt(scene, y) {
  const row = Math.floor((y - AXIS + scene.top) / scene.rowHeight);
  return y >= AXIS && row >= 0 && row < scene.rows.length ? row : -1;
}

/** Sizes the canvas for its CSS size and the screen's pixels. @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ctx;
}

/**
 * A strip one pixel high that darkens where steps were slow: laid over decode spans.
 * @param {ArrayLike<number>} starts seconds @param {ArrayLike<number>} lengths milliseconds
 * @param {HTMLCanvasElement} [strip] used again @returns {Slow|null}
 */
export function slowStrip(starts, lengths, strip = document.createElement("canvas")) {
  const count = starts.length;
  if (count < 2) return null;
  const [from, to] = [starts[0], starts[count - 1] + lengths[count - 1] / 1e3];
  const usual = Float64Array.from(lengths).sort()[count >> 1] || 1;
  const wide = 2048;
  strip.width = wide;
  strip.height = 1;
  const pen = /** @type {CanvasRenderingContext2D} */ (strip.getContext("2d"));
  pen.fillStyle = "#000";
  for (let index = 0; index < count; index += 1) {
    const slower = lengths[index] / usual - 1;
    if (!(slower > 0.25)) continue;
    pen.globalAlpha = Math.min(0.55, 0.12 + slower * 0.12);
    const x = ((starts[index] - from) / (to - from)) * wide;
    pen.fillRect(x, 0, Math.max(1, ((lengths[index] / 1e3) / (to - from)) * wide), 1);
  }
  return { from, to, strip };
}

function drawAxis(ctx, scene) {
  const { width, gutter, from, to, now } = scene;
  ctx.fillStyle = colour("bg");
  ctx.fillRect(0, 0, width, AXIS);
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  ctx.textAlign = "center";
  const step = tickStep(to - from, (width - gutter) / 80);
  const digits = step < 1 ? Math.ceil(-Math.log10(step)) : 0;
  for (let back = Math.ceil((now - to) / step) * step; now - back >= from; back += step) {
    const x = Math.round(xOf(scene, now - back)) + 0.5;
    ctx.fillStyle = colour("line");
    ctx.fillRect(x, AXIS, 1, scene.height - AXIS);
    const label = Math.abs(back) < step / 2 ? "now" : `${back > 0 ? "−" : "+"}${Math.abs(back).toFixed(digits)} s`;
    const half = ctx.measureText(label).width / 2;
    ctx.fillStyle = colour("muted");
    ctx.fillText(label, Math.min(Math.max(x, gutter + half), width - half - 2), AXIS / 2);
  }
  ctx.textAlign = "left";
}

/** One span; a light strip under prefill shows the cached share of the prompt. */
function drawSpan(ctx, scene, row, span, y, high) {
  const [phase, start, end, tokens] = span;
  const look = PHASES[phase] ?? PHASES.queue;
  const left = Math.max(scene.gutter, xOf(scene, start));
  const right = Math.min(scene.width, xOf(scene, end ?? scene.now));
  if (right < scene.gutter || left > scene.width) return;
  const wide = Math.max(1, right - left);
  ctx.fillStyle = fillOf(ctx, look.colour, look.pattern);
  const thin = phase === "queue" || phase === "retracted" || phase === "engine_dead" || phase === "prefix_wait" || phase === "grammar";
  const inset = thin ? Math.round(high / 4) : 0;
  ctx.fillRect(left, y + inset, wide, high - 2 * inset);
  if (phase === "decode" && scene.slow) drawSlow(ctx, scene, left, right, y, high);
  const text = phase === "prefill" && tokens > 0 ? String(tokens) : phase === "engine_dead" ? scene.phaseNames.engine_dead : "";
  if (phase === "prefill" && wide > 3) {
    ctx.fillStyle = colour("bg");
    ctx.fillRect(right - 0.5, y, 1, high); // chunks are told apart
  }
  if (text && wide > 8 + text.length * 6.2) label(ctx, text, left + 4, y + high / 2, phase);
}

function label(ctx, text, x, y, phase) {
  if (phase === "engine_dead") {
    const wide = ctx.measureText(text).width + 6;
    ctx.fillStyle = colour("bg");
    ctx.fillRect(x - 1, y - 7, wide, 14);
  }
  ctx.fillStyle = phase === "engine_dead" ? colour("fg") : colour("on-prefill");
  ctx.fillText(text, x + (phase === "engine_dead" ? 2 : 0), y + 0.5);
}

function drawSlow(ctx, scene, left, right, y, high) {
  const { from, to, strip } = scene.slow;
  const first = Math.max(left, xOf(scene, from));
  const last = Math.min(right, xOf(scene, to));
  if (last - first < 1) return;
  const scale = strip.width / (to - from);
  ctx.drawImage(strip, (timeOf(scene, first) - from) * scale, 0, (timeOf(scene, last) - timeOf(scene, first)) * scale, 1, first, y, last - first, high);
}

function drawCached(ctx, scene, row, y, high) {
  if (!row.cached || !row.prompt) return;
  const first = row.spans.findIndex(([phase]) => phase === "prefill");
  if (first < 0) return;
  const after = row.spans.findIndex(([phase], at) => at > first && phase !== "prefill");
  const chunks = row.spans.slice(first, after < 0 ? undefined : after);
  const left = Math.max(scene.gutter, xOf(scene, chunks[0][1]));
  const right = xOf(scene, chunks[chunks.length - 1][2] ?? scene.now);
  ctx.fillStyle = fillOf(ctx, PHASES.cached.colour, PHASES.cached.pattern);
  const wide = Math.min(scene.width, left + Math.max(2, (right - left) * Math.min(1, row.cached / row.prompt))) - left;
  if (wide > 0) ctx.fillRect(left, y + high - 5, wide, 5);
}

function drawRow(ctx, scene, index, y) {
  const row = scene.rows[index];
  const high = scene.rowHeight - 6;
  const isMarked = index === scene.focus || index === scene.hover || row.id === scene.opened;
  if (isMarked) {
    ctx.fillStyle = colour(index === scene.focus || row.id === scene.opened ? "selected" : "hover");
    ctx.fillRect(0, y, scene.width, scene.rowHeight);
  }
  ctx.save();
  ctx.beginPath();
  ctx.rect(scene.gutter, y, scene.width - scene.gutter, scene.rowHeight);
  ctx.clip();
  for (const span of row.spans) drawSpan(ctx, scene, row, span, y + 3, high);
  drawCached(ctx, scene, row, y + 3, high);
  if (row.ended_s !== null) drawEnd(ctx, scene, row, y);
  ctx.restore();
  ctx.fillStyle = colour(isMarked ? "fg" : "muted");
  ctx.fillText(scene.nameOf(row), 8, y + scene.rowHeight / 2 + 0.5, scene.gutter - 14);
  if (index === scene.focus) {
    ctx.strokeStyle = colour("accent");
    ctx.lineWidth = 2;
    ctx.strokeRect(1, y + 1, scene.width - 2, scene.rowHeight - 2);
  }
}

function drawEnd(ctx, scene, row, y) {
  const x = xOf(scene, row.ended_s);
  if (x < scene.gutter || x > scene.width) return;
  ctx.fillStyle = colour("fg");
  ctx.fillRect(x - 1, y + 2, 2, scene.rowHeight - 4);
  if (row.finish) {
    ctx.fillStyle = colour(row.finish === "stop" || row.finish === "length" ? "muted" : "bad");
    ctx.fillText(row.finish, x + 5, y + scene.rowHeight / 2 + 0.5);
  }
}

/** Draws all that is visible. @param {CanvasRenderingContext2D} ctx @param {Scene} scene */
export function drawWaterfall(ctx, scene) {
  ctx.fillStyle = colour("bg");
  ctx.fillRect(0, 0, scene.width, scene.height);
  if (!Number.isFinite(scene.now)) return;
  drawAxis(ctx, scene);
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, AXIS, scene.width, scene.height - AXIS);
  ctx.clip();
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  const first = Math.max(0, Math.floor(scene.top / scene.rowHeight));
  const last = Math.min(scene.rows.length, Math.ceil((scene.top + scene.height - AXIS) / scene.rowHeight));
  for (let index = first; index < last; index += 1) drawRow(ctx, scene, index, AXIS + index * scene.rowHeight - scene.top);
  ctx.restore();
  const now = xOf(scene, scene.now);
  if (now <= scene.width && now >= scene.gutter) {
    ctx.fillStyle = colour("accent");
    ctx.fillRect(now - 0.5, AXIS - 4, 1, scene.height);
  }
}
