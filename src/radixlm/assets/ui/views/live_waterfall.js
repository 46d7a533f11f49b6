// The waterfall: a row a request, newest on top, and the request that is opened.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { t } from "../messages.js";
import { Legend } from "../lib/chart.js";
import { count, seconds } from "../lib/format.js";
import { Twin } from "../lib/table.js";
import { onTheme, reducedMotion } from "../lib/theme.js";
import { AXIS, drawWaterfall, fit, PHASES, rowAt, slowStrip, timeOf } from "../lib/waterfall.js";
import { RequestDetail } from "./live_request.js";
import { nameOf, Panel, useOnce, useTopics } from "./live_parts.js";
import { phaseOrder, phaseSeconds } from "./live_state.js";

const ROW_HEIGHT = 24;
const WINDOWS = [2, 5, 10, 30, 60, 120, 300, 600, 1200];
const OFFERED = [10, 60, 300, 1200];

/** "queue 1.2 ms → prefill 30 ms → decode 2.1 s". */
export function phasesText(row, now) {
  const sums = phaseSeconds(row, now);
  const order = phaseOrder(row);
  const once = (phase) => order.indexOf(phase) === order.lastIndexOf(phase);
  return order.map((phase) => (once(phase) ? `${short(phase)} ${seconds(sums[phase])}` : short(phase))).join(" → ");
}

/** The phase's name without its explanation. @param {string} phase */
export const short = (phase) => t(`phase.${phase}`).replace(/ \(.*\)$/, "");

/** The part that is not Preact: canvas, pointer, keys. */
class Fall {
  constructor(model) {
    this.model = model;
    this.window = 60; // seconds; 0: all
    this.held = null; // rows and moments while stopped
    this.shift = 0; // seconds that the right edge lies before now
    this.focus = this.hover = this.opened = null; // ids
    this.stale = true;
    this.strip = document.createElement("canvas");
    this.changed = () => {};
  }

  mount(box, canvas, space) {
    Object.assign(this, { box, canvas, space, frame: 0, slow: null, isAlive: true, drawnAt: 0 });
    const touch = () => { this.stale = true; };
    const sized = new ResizeObserver(touch);
    sized.observe(box);
    const stops = [onTheme(touch), this.model.listen((topic) => {
      if (topic === "steps") this.slow = undefined;
      this.stale ||= topic === "requests" || topic === "steps" || topic === "hello";
    })];
    box.addEventListener("scroll", touch, { passive: true });
    const loop = () => {
      if (!this.isAlive) return;
      this.turn();
      this.frame = requestAnimationFrame(loop);
    };
    loop();
    return () => { this.isAlive = false; cancelAnimationFrame(this.frame); sized.disconnect(); stops.forEach((stop) => stop()); };
  }

  /** Draws if something changed, or time moved by a pixel (by a second with reduced motion). */
  turn() {
    const moved = performance.now() / 1e3 - this.drawnAt;
    const { from, to } = this.span();
    const pixel = (to - from) / Math.max(1, this.box.clientWidth);
    const due = this.held ? Infinity : reducedMotion() ? 1 : Math.max(1 / 60, pixel);
    if (!(this.stale ? moved > 0.03 : moved > due)) return;
    this.stale = false;
    this.drawnAt = performance.now() / 1e3;
    this.draw();
  }

  rows() { return this.held?.rows ?? this.model.newest(); }
  now() { return this.held?.now ?? this.model.serverNow(); }

  span() {
    const now = this.now();
    const rows = this.rows();
    if (!this.window) {
      const first = rows.length ? rows[rows.length - 1].begun_s : now - 10;
      return { from: first, to: now + Math.max(0.5, (now - first) * 0.02) };
    }
    const to = now - this.shift + this.window * 0.03;
    return { from: to - this.window, to };
  }

  scene() {
    const rows = this.rows();
    const width = this.box.clientWidth;
    const index = (id) => (id === null ? -1 : rows.findIndex((row) => row.id === id));
    if (this.slow === undefined || this.slow === null) this.slow = slowStrip(this.model.steps.get("start_s"), this.model.steps.get("total_ms"), this.strip);
    return {
      ...this.span(), now: this.now(), rows, width, height: this.box.clientHeight, rowHeight: ROW_HEIGHT, top: this.box.scrollTop,
      gutter: width < 560 ? 72 : 150, focus: index(this.focus), hover: index(this.hover), opened: this.opened, slow: this.slow,
      nameOf: width < 560 ? (row) => nameOf(row).slice(0, 8) : (row) => `${nameOf(row).slice(0, 10)}  ${count(row.prompt)}→${count(row.out)}`,
      phaseNames: { engine_dead: t("phase.engine_dead") },
    };
  }

  draw() {
    const scene = this.scene();
    if (!scene.width || !scene.height) return;
    this.space.style.height = `${AXIS + scene.rows.length * ROW_HEIGHT}px`;
    drawWaterfall(fit(this.canvas, scene.width, scene.height), scene);
  }

  hold(isHeld) {
    if (isHeld === Boolean(this.held)) return;
    this.held = isHeld ? { now: this.model.serverNow(), rows: [...this.model.newest()] } : null;
    if (!isHeld) this.shift = 0;
    this.touch();
  }

  touch() { this.stale = true; this.changed(); }

  pan(time) {
    this.hold(true);
    this.shift = Math.max(0, this.shift + time);
    this.touch();
  }

  zoom(step) {
    const at = WINDOWS.findIndex((one) => one >= (this.window || Infinity));
    this.window = WINDOWS[Math.max(0, Math.min(WINDOWS.length - 1, (at < 0 ? WINDOWS.length : at) + step))];
    this.touch();
  }

  /** Moves the row with the focus and keeps it in sight. */
  move(step) {
    const rows = this.rows();
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.id === this.focus);
    const next = Math.max(0, Math.min(rows.length - 1, at < 0 ? (step > 0 ? 0 : rows.length - 1) : at + step));
    this.focus = rows[next].id;
    const top = next * ROW_HEIGHT;
    const room = this.box.clientHeight - AXIS - ROW_HEIGHT;
    this.box.scrollTop = Math.min(top, Math.max(top - room, this.box.scrollTop));
    this.touch();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowUp: () => this.move(-1), ArrowDown: () => this.move(1), PageUp: () => this.move(-10), PageDown: () => this.move(10), Home: () => this.move(-1e9),
      End: () => this.hold(false), ArrowLeft: () => this.pan((this.window || 60) / 10), ArrowRight: () => this.pan(-(this.window || 60) / 10),
      "+": () => this.zoom(-1), "=": () => this.zoom(-1), "-": () => this.zoom(1), " ": () => this.hold(!this.held),
      Enter: () => this.focus && open(this.focus),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** Hover, drag in time, click. @param {PointerEvent} event */
  pointer(event) {
    const area = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - area.left, event.clientY - area.top];
    const scene = this.scene();
    const row = event.type === "pointerleave" ? -1 : rowAt(scene, y);
    if (event.type === "pointerdown") this.drag = { x, time: timeOf(scene, x), moved: false };
    if (event.type === "pointermove" && this.drag && event.buttons) {
      if (Math.abs(x - this.drag.x) > 4) this.drag.moved = true;
      if (this.drag.moved && this.window) this.pan(timeOf(scene, x) - this.drag.time);
    }
    if (event.type === "pointerup") {
      if (row >= 0 && this.drag && !this.drag.moved) open((this.focus = scene.rows[row].id));
      this.drag = null;
    }
    const id = row < 0 ? null : scene.rows[row].id;
    this.at = { x, y };
    if (id !== this.hover || event.type === "pointermove") {
      this.hover = id;
      this.touch();
    }
  }
}

/** Opens a request by its address. @param {string} id */
export function open(id) { location.hash = `#/live/${encodeURIComponent(id)}`; }

function HoverCard({ fall }) {
  const card = useRef(null);
  const row = fall.hover && !fall.drag?.moved ? fall.rows().find((one) => one.id === fall.hover) : null;
  useEffect(() => {
    if (!row || !card.current) return;
    const wide = fall.box.clientWidth;
    card.current.style.left = `${Math.max(4, Math.min(fall.at.x + 14, wide - card.current.offsetWidth - 4))}px`;
    card.current.style.top = `${fall.at.y + 18}px`;
  });
  if (!row) return null;
  const facts = [["fall.prompt", count(row.prompt)], ["fall.cached", count(row.cached)], ["fall.out", count(row.out)], ["fall.finish", row.finish ?? t("fall.running")],
    ["fall.adapter", row.adapter], ["fall.priority", row.priority], ["fall.tenant", row.tenant], ["fall.route", row.route]];
  return html`<div class="fall-card" ref=${card} aria-hidden="true"><b class="mono">${nameOf(row)}</b>
    <div>${phasesText(row, fall.now())}</div>
    <dl class="facts">${facts.filter(([, value]) => value != null && value !== "").map(([key, value]) => html`<div key=${key}><dt>${t(key)}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}

/** @param {import("./live_state.js").LiveModel} model @param {number} now */
function fallTable(model, now) {
  const figure = (key) => ({ key, label: t(`fall.${key}`), num: true, sort: true, format: count });
  const columns = [
    { key: "id", label: t("fall.request"), format: (_, row) => nameOf(row) },
    { key: "begun_s", label: t("fall.age"), num: true, sort: true, format: (at) => t("fall.ago", { time: seconds(now - at) }) },
    { key: "phases", label: t("fall.phases"), text: true, format: (_, row) => phasesText(row, now) },
    figure("prompt"), figure("cached"), figure("out"),
    { key: "total", label: t("fall.total"), num: true, format: (_, row) => seconds((row.ended_s ?? now) - row.begun_s) },
    { key: "finish", label: t("fall.finish"), sort: true, format: (why, row) => why ?? (row.ended_s === null ? t("fall.open") : "–") },
    { key: "adapter", label: t("fall.adapter") }, { key: "priority", label: t("fall.priority"), num: true }, { key: "tenant", label: t("fall.tenant") },
  ];
  return { columns, rows: model.newest(), empty: t("fall.none"), onRow: (row) => open(row.id), rowLabel: nameOf };
}

function Canvas({ fall }) {
  const [box, space, canvas] = [useRef(null), useRef(null), useRef(null)];
  const [, draw] = useState(0);
  useEffect(() => {
    fall.changed = () => draw((count) => count + 1);
    const stop = fall.mount(box.current, canvas.current, space.current);
    return () => { fall.changed = () => {}; stop(); };
  }, [fall]);
  const on = (event) => fall.pointer(event);
  const row = fall.focus && fall.rows().find((one) => one.id === fall.focus);
  const said = row ? t("fall.row", { name: nameOf(row), phases: phasesText(row, fall.now()), prompt: row.prompt, cached: row.cached, out: row.out }) : "";
  return html`<div class="fall-frame">
    <div class="fall" ref=${box} tabindex="0" role="group" aria-label=${t("fall.label")} onKeyDown=${(event) => fall.key(event)}>
      <div class="fall-space" ref=${space}>
        <canvas class="fall-canvas" ref=${canvas} onPointerMove=${on} onPointerDown=${on} onPointerUp=${on} onPointerLeave=${on}></canvas>
      </div>
    </div>
    <${HoverCard} fall=${fall} />
    <p class="visually-hidden" aria-live="polite">${said}</p>
  </div>`;
}

/** The phases that this server tells of. */
const legendOf = (model) => Object.entries(PHASES).filter(([phase]) => phase === "cached" || (model.hello?.phases ?? []).includes(phase)).map(([phase, look]) => ({ label: t(`phase.${phase}`), ...look }));

/** @param {{model: import("./live_state.js").LiveModel, path: string, onSteps: (range: [number, number]) => void}} props */
export function Waterfall({ model, path, onSteps }) {
  const fall = useOnce(() => new Fall(model));
  const [, draw] = useState(0);
  useTopics(model, ["requests"], 4);
  const rows = model.newest();
  const opened = path ? rows.find((row) => row.id === path || row.rid === path) : null;
  fall.opened = opened?.id ?? null;
  const set = (act) => { act(); fall.touch(); draw((count) => count + 1); };
  const ended = rows.filter((row) => row.ended_s !== null).length;
  const offered = fall.window && !OFFERED.includes(fall.window) ? [fall.window, ...OFFERED] : OFFERED;
  const tools = html`<label>${t("fall.window")} <select value=${fall.window} onChange=${(event) => set(() => { fall.window = Number(event.target.value); })}>
      ${offered.map((one) => html`<option key=${one} value=${one}>${OFFERED.includes(one) ? t(`fall.${one}`) : `${one} s`}</option>`)}<option value="0">${t("fall.all")}</option></select></label>
    <button type="button" class="small" aria-pressed=${fall.held ? "false" : "true"} onClick=${() => set(() => fall.hold(!fall.held))}>${t("fall.follow")}</button>`;
  return html`<${Panel} id="live-requests" title=${t("fall.title")}>
    <${Twin} caption=${t("fall.title")} summary=${t("fall.summary", { count: rows.length, open: rows.length - ended, ended })} label=${t("live.table")} tools=${tools} table=${() => fallTable(model, model.serverNow())}>
      <${Legend} entries=${legendOf(model)} />
      <${Canvas} fall=${fall} />
    </${Twin}>
    ${path && html`<${RequestDetail} key=${path} model=${model} path=${path} row=${opened} onSteps=${onSteps} />`}
  </${Panel}>`;
}
