/** Colours of the theme for canvases, and patterns that tell colours apart without colour. */

const REDUCED = matchMedia("(prefers-reduced-motion: reduce)");
const QUERIES = ["(prefers-color-scheme: dark)", "(forced-colors: active)", "(prefers-contrast: more)"].map((one) => matchMedia(one));

/** @returns {boolean} whether the reader asked for less motion */
export const reducedMotion = () => REDUCED.matches;

let colours = new Map();
const listeners = new Set();

function changed() {
  colours = new Map();
  tiles.clear();
  for (const listener of listeners) listener();
}
for (const query of QUERIES) query.addEventListener("change", changed);
new MutationObserver(changed).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });

/** Calls `listener` when colours change. @param {() => void} listener @returns {() => void} stop */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The value of a CSS variable. @param {string} name without the two dashes @returns {string} */
export function colour(name) {
  let value = colours.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "gray";
    colours.set(name, value);
  }
  return value;
}

const SIZE = 8;
/** Strokes of one tile of 8 x 8 pixels, as lines [x0, y0, x1, y1]. @type {Record<string, number[][]>} */
const STROKES = {
  slant: [[-2, 6, 6, -2], [2, 10, 10, 2]],
  back: [[-2, 2, 6, 10], [2, -2, 10, 6]],
  cross: [[0, 4, 8, 4], [4, 0, 4, 8]],
  lines: [[0, 2, 8, 2], [0, 6, 8, 6]],
  posts: [[2, 0, 2, 8], [6, 0, 6, 8]],
  dots: [[1, 2, 3, 2], [5, 6, 7, 6]],
};
/** @type {Map<string, CanvasPattern|string>} */
const tiles = new Map();

/**
 * A fill of a colour with a pattern over it.
 * @param {CanvasRenderingContext2D} ctx
 * @param {string} name CSS variable
 * @param {string} [pattern] a key of STROKES; none: plain
 * @returns {CanvasPattern|string}
 */
export function fillOf(ctx, name, pattern) {
  const fill = colour(name);
  if (!pattern) return fill;
  const key = `${name} ${pattern}`;
  let tile = tiles.get(key);
  if (!tile) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = SIZE;
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.fillStyle = fill;
    pen.fillRect(0, 0, SIZE, SIZE);
    pen.strokeStyle = colour("bg");
    pen.globalAlpha = 0.65;
    pen.lineWidth = 1.4;
    for (const [x0, y0, x1, y1] of STROKES[pattern]) {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    tile = /** @type {CanvasPattern} */ (ctx.createPattern(canvas, "repeat"));
    tiles.set(key, tile);
  }
  return tile;
}

/** Patterns drawn in a legend's swatch. @param {HTMLCanvasElement|null} canvas @param {string} name @param {string} [pattern] */
export function paintSwatch(canvas, name, pattern) {
  const ctx = canvas?.getContext("2d");
  if (!canvas || !ctx) return;
  ctx.fillStyle = fillOf(ctx, name, pattern);
  ctx.fillRect(0, 0, canvas.width, canvas.height);
}
