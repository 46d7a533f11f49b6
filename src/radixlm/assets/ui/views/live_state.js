/** What the live view knows: the feed's frames, folded into bounded tables. No DOM here. */

export const STEPS = 600;
export const HISTORY = 600; // seconds: the sparklines' ten minutes
export const ROWS = 200;
const KEPT_ROWS = 260;
const LOG_LINES = 500;
const DEATHS = 50;
const TOPICS = ["head", "requests", "steps", "deaths", "log"];

export const STEP_PHASES = ["plan_ms", "prepare_ms", "model_ms", "sample_ms", "commit_ms", "wait_ms"];
const STEP_COLUMNS = ["index", "start_s", "total_ms", ...STEP_PHASES, "decodes", "prefill_tokens", "forced", "accepted", "budget", "free_pages", "retracted", "evicted"];
const POOL = ["running", "cached_free", "cached_locked", "free", "window"];
export const HEAD_COLUMNS = ["t", "running", "waiting", "in_per_s", "out_per_s", "kv_used", "hit_rate", "ttft", "itl", "e2e", "retracted_per_s", "evicted_per_s", ...POOL.map((name) => `pages_${name}`)];

/** Columns of numbers of which the last `capacity` rows are kept, without garbage. */
export class Columns {
  /** @param {string[]} names @param {number} capacity */
  constructor(names, capacity) {
    this.names = names;
    this.capacity = capacity;
    /** @type {Record<string, Float64Array>} */
    this.store = Object.fromEntries(names.map((name) => [name, new Float64Array(2 * capacity)]));
    this.begin = 0;
    this.end = 0;
  }

  get length() { return this.end - this.begin; }

  clear() { this.begin = this.end = 0; }

  /** @param {Record<string, number|null|undefined>} row what is absent is NaN */
  push(row) {
    if (this.end === 2 * this.capacity) {
      for (const name of this.names) this.store[name].copyWithin(0, this.begin, this.end);
      this.end -= this.begin;
      this.begin = 0;
    }
    for (const name of this.names) this.store[name][this.end] = row[name] ?? NaN;
    this.end += 1;
    if (this.length > this.capacity) this.begin += 1;
  }

  /** The kept values, oldest first: a view, valid until the next push. @param {string} name */
  get(name) { return this.store[name].subarray(this.begin, this.end); }

  /** @param {string} name @param {number} [back] rows before the last */
  last(name, back = 0) { return this.length > back ? this.store[name][this.end - 1 - back] : NaN; }
}

/**
 * @typedef {[string, number, number|null, number]} Span phase, start, end (null: goes on), tokens
 * @typedef {{id: string, rid: string|null, begun_s: number, ended_s: number|null, prompt: number, cached: number,
 *   out: number, adapter: string|null, priority: number|null, tenant: string|null, finish: string|null,
 *   route: string|null, spans: Span[]}} Row
 */

const clockNow = () => performance.now() / 1e3;

export class LiveModel {
  /** @param {() => number} now the browser's clock in seconds */
  constructor(now = clockNow) {
    this.now = now;
    this.listeners = new Set();
    this.hello = null;
    this.head = null;
    this.history = new Columns(HEAD_COLUMNS, HISTORY);
    /** Steps by replica. @type {Map<number, Columns>} */
    this.replicas = new Map();
    this.replica = 0;
    /** @type {Map<string, Row>} */
    this.rows = new Map();
    this.order = null;
    this.deaths = [];
    this.log = [];
    this.offset = null;
  }

  /** The steps of the replica that is shown. */
  get steps() { return this.stepsOf(this.replica); }

  /** @param {number} replica */
  stepsOf(replica) {
    let found = this.replicas.get(replica);
    if (!found) this.replicas.set(replica, (found = new Columns(STEP_COLUMNS, STEPS)));
    return found;
  }

  /** Subscribes to a store until the answer is called. */
  attach(store) {
    return store.subscribe(TOPICS, (topic, data) => this.apply(topic, data));
  }

  /** @param {(topic: string) => void} listener @returns {() => void} stop */
  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Takes one frame. @param {string} topic @param {any} data */
  apply(topic, data) {
    const take = { hello: this.onHello, head: this.onHead, requests: this.onRequests, steps: this.onSteps, deaths: this.onDeaths, log: this.onLog }[topic];
    if (!take) return;
    take.call(this, data);
    for (const listener of this.listeners) listener(topic);
  }

  /** Now on the server's clock, in seconds; NaN before the first frame. */
  serverNow() { return this.offset === null ? NaN : this.now() + this.offset; }

  /** Unix time of a moment of the server's clock. @param {number} at */
  unix(at) { return this.hello ? this.hello.unix_s + (at - this.hello.now_s) : NaN; }

  /** The server's clock by its newest stamp: small differences (delays on the way) are smoothed, jumps taken. */
  synchronise(at) {
    const offset = at - this.now();
    const change = this.offset === null ? Infinity : Math.abs(offset - this.offset);
    this.offset = change > 1 ? offset : this.offset + (offset - this.offset) * 0.1;
  }

  onHello(hello) {
    const before = this.serverNow();
    this.hello = hello;
    if (hello.now_s < before - 5) this.forget(); // another machine, or its clock began again
    this.offset = null;
    this.synchronise(hello.now_s);
  }

  forget() {
    for (const table of [this.history, this.replicas, this.rows]) table.clear();
    this.order = null;
    this.deaths = [];
    this.head = null;
  }

  onHead(head) {
    const before = this.head;
    this.head = head;
    this.synchronise(head.t);
    const passed = before ? head.t - before.t : NaN;
    const rate = (name) => (passed > 0 ? Math.max(0, head[name] - before[name]) / passed : NaN);
    const p95 = (name) => head.percentiles?.[name]?.["1m"]?.[1];
    const row = { ...head, ttft: p95("ttft"), itl: p95("itl"), e2e: p95("e2e"), retracted_per_s: rate("retracted"), evicted_per_s: rate("evicted") };
    for (const name of POOL) row[`pages_${name}`] = head.pages?.[name];
    if (passed > 5) this.history.push({ t: head.t - passed / 2 }); // a gap: nobody looked
    this.history.push(row);
  }

  onRequests({ rows }) {
    const names = this.hello?.phases ?? [];
    for (const row of rows) {
      for (const span of row.spans) if (typeof span[0] === "number") span[0] = names[span[0]] ?? "queue";
      this.rows.set(row.id, row);
    }
    this.order = null;
    if (this.rows.size > KEPT_ROWS) {
      const kept = new Set(this.newest().slice(0, ROWS));
      for (const row of this.rows.values()) if (!kept.has(row)) this.rows.delete(row.id);
    }
  }

  /** Rows, newest first, at most 200. @returns {Row[]} */
  newest() {
    this.order ??= [...this.rows.values()].sort((one, two) => two.begun_s - one.begun_s || (one.id < two.id ? 1 : -1));
    return this.order.length > ROWS ? (this.order = this.order.slice(0, ROWS)) : this.order;
  }

  /** `index`: numbers of the steps where some are missing, else they follow `first`. */
  onSteps({ replica = 0, first, index, columns }) {
    const starts = columns.start_s;
    const steps = this.stepsOf(replica);
    const number = (at) => (index ? index[at] : first + at);
    if (starts.length && number(0) <= steps.last("index") && starts[0] > steps.last("start_s")) steps.clear(); // a new server counts from 0
    const last = steps.last("index");
    for (let at = 0; at < starts.length; at += 1) {
      if (number(at) <= last) continue; // sent again after a reconnect
      const row = { index: number(at), total_ms: 0 };
      for (const name of STEP_COLUMNS) if (columns[name]) row[name] = columns[name][at];
      for (const name of STEP_PHASES) row.total_ms += row[name] ?? 0;
      steps.push(row);
    }
  }

  onDeaths(death) {
    const known = this.deaths.findIndex((one) => one.t === death.t);
    if (known >= 0) this.deaths[known] = death;
    else this.deaths.unshift(death);
    this.deaths.length = Math.min(this.deaths.length, DEATHS);
  }

  onLog({ lines }) {
    this.log = [...this.log, ...lines].slice(-LOG_LINES);
  }

  /** The kept step with this index, as an object; null if it is gone. @param {number} index */
  step(index) {
    const at = this.steps.get("index").indexOf(index);
    return at < 0 ? null : Object.fromEntries(this.steps.names.map((name) => [name, this.steps.get(name)[at]]));
  }

  /** Requests in work during a step: those with a span of work that overlaps it. @param {{start_s: number, total_ms: number}} step */
  during(step) {
    const end = step.start_s + step.total_ms / 1e3;
    const works = ([phase, from, to]) => (phase === "prefill" || phase === "decode") && from < end && (to ?? Infinity) > step.start_s;
    return this.newest().filter((row) => row.spans.some(works));
  }
}

/** Seconds by phase of a request. @param {Row} row @param {number} now @returns {Record<string, number>} */
export function phaseSeconds(row, now) {
  const sums = {};
  for (const [phase, from, to] of row.spans) sums[phase] = (sums[phase] ?? 0) + Math.max(0, (to ?? now) - from);
  return sums;
}

/** Phases of a request in order, neighbours of one kind as one. @param {Row} row @returns {string[]} */
export function phaseOrder(row) {
  const order = [];
  for (const [phase] of row.spans) if (order[order.length - 1] !== phase) order.push(phase);
  return order;
}
