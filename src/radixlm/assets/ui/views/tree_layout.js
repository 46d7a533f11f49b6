// The radix tree of the cache, laid out as an icicle. No DOM here.

/**
 * @typedef {{serial: number, parent: number, tokens: number, hits: number, locks: number, age_s: number,
 *   isTombstone: boolean, text: string|null, children: Node[], up: Node|null, depth: number, from: number,
 *   total: number, path: number, rate: number}} Node
 *   `from`, `total`: its place on the x axis, in tokens; `path`: tokens from the root to its end; `rate`: hits per minute
 * @typedef {{nodes: Map<number, Node>, order: Node[], roots: Node[], total: number, depth: number,
 *   rest: {nodes: number, tokens: number}}} Tree `order`: as one reads it, parents first
 */

const MINUTE_MS = 60_000;

/** @param {any} frame @returns {Tree} */
export function layout(frame) {
  const nodes = new Map();
  for (const [serial, parent, tokens, hits, locks, age, tomb, text] of frame.nodes) {
    nodes.set(serial, { serial, parent, tokens, hits, locks, age_s: age, isTombstone: Boolean(tomb), text: text ?? null, children: [], up: null, depth: 0, from: 0, total: tokens, path: tokens, rate: 0 });
  }
  const roots = [];
  for (const node of nodes.values()) {
    node.up = nodes.get(node.parent) ?? null;
    (node.up?.children ?? roots).push(node);
  }
  const order = placed(roots);
  const shown = roots.reduce((sum, node) => sum + node.total, 0);
  const rest = frame.rest ?? { nodes: 0, tokens: 0 };
  const depth = order.reduce((most, node) => Math.max(most, node.depth + 1), 1);
  return { nodes, order, roots, total: Math.max(1, shown + rest.tokens), depth, rest };
}

/** Gives each node its place; without recursion, since paths may be long. @param {Node[]} roots @returns {Node[]} */
function placed(roots) {
  const order = [];
  const waiting = [...roots].reverse();
  while (waiting.length) {
    const node = waiting.pop();
    node.depth = node.up ? node.up.depth + 1 : 0;
    node.path = node.tokens + (node.up ? node.up.path : 0);
    order.push(node);
    for (let at = node.children.length - 1; at >= 0; at -= 1) waiting.push(node.children[at]);
  }
  for (const node of [...order].reverse()) if (node.up) node.up.total += node.total;
  for (const list of [roots, ...order.map((node) => node.children)]) list.sort((one, two) => one.serial - two.serial);
  let at = 0;
  for (const root of roots) { root.from = at; at += root.total; }
  for (const node of order) {
    let from = node.from;
    for (const child of node.children) { child.from = from; from += child.total; }
  }
  return order;
}

/** Keeps the last tree, hits per minute, and what was evicted since the frame before. */
export class TreeModel {
  /** @param {() => number} now milliseconds */
  constructor(now = () => performance.now()) {
    this.now = now;
    /** @type {Tree|null} */
    this.tree = null;
    /** @type {Map<number, [number, number][]>} serial -> [ms, hits] of the last minute */
    this.seen = new Map();
    /** @type {Node[]} */
    this.gone = [];
    this.listeners = new Set();
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** @param {string} topic @param {any} data */
  apply(topic, data) {
    if (topic === "hello") this.seen.clear();
    if (topic !== "tree") return;
    const before = this.tree;
    this.tree = layout(data);
    this.count();
    const fell = before && data.total_tokens < (this.totalTokens ?? 0);
    this.gone = fell ? before.order.filter((node) => !this.tree.nodes.has(node.serial)) : [];
    this.totalTokens = data.total_tokens;
    for (const listener of this.listeners) listener(topic);
  }

  /** Hits per minute, from what was seen in the last minute. */
  count() {
    const now = this.now();
    for (const serial of this.seen.keys()) if (!this.tree.nodes.has(serial)) this.seen.delete(serial);
    for (const node of this.tree.nodes.values()) {
      let marks = this.seen.get(node.serial);
      if (!marks) this.seen.set(node.serial, (marks = []));
      marks.push([now, node.hits]);
      while (marks.length > 2 && marks[1][0] < now - MINUTE_MS) marks.shift();
      const passed = now - marks[0][0];
      node.rate = passed > 0 ? ((node.hits - marks[0][1]) * MINUTE_MS) / Math.max(passed, MINUTE_MS / 6) : 0;
    }
  }
}

const HEAT = [0, 1, 5, 20, 100];
/** Class of colour 0 to 5 of hits per minute. @param {number} rate */
export const heat = (rate) => (rate <= 0 ? 0 : HEAT.filter((least) => rate >= least).length);

/** The neighbour in a direction, or the node itself. @param {Tree} tree @param {Node} node @param {string} key */
export function neighbour(tree, node, key) {
  if (key === "ArrowUp") return node.up ?? node;
  if (key === "ArrowDown") return node.children[0] ?? node;
  const level = tree.order.filter((one) => one.depth === node.depth).sort((one, two) => one.from - two.from);
  const at = level.indexOf(node) + (key === "ArrowRight" ? 1 : -1);
  return level[at] ?? node;
}
