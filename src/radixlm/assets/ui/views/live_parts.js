// What the parts of the live and tree views share: a hook on the model, panels.
import { html, useEffect, useReducer, useRef } from "../vendor/preact.js";

/**
 * Draws the component again when one of these topics came, at most `rate` times a second.
 * @param {import("./live_state.js").LiveModel} model @param {string[]} topics @param {number} [rate]
 */
export function useTopics(model, topics, rate = 10) {
  const [, draw] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    let timer = 0;
    let drawn = 0;
    const now = () => {
      timer = 0;
      drawn = performance.now();
      draw(undefined);
    };
    const stop = model.listen((topic) => {
      if (!timer && (topics.includes(topic) || topic === "hello")) timer = setTimeout(now, Math.max(0, drawn + 1000 / rate - performance.now()));
    });
    return () => { stop(); clearTimeout(timer); };
  }, [model]);
}

/** A section of the page with a heading. */
export function Panel({ id, title, children, wide, tools }) {
  return html`<section class=${`panel live-panel${wide ? " wide" : ""}`} aria-labelledby=${`${id}-title`} id=${id}>
    <div class="panel-head"><h2 id=${`${id}-title`}>${title}</h2>${tools}</div>
    ${children}
  </section>`;
}

/** Keeps a value over draws without drawing. @template T @param {() => T} make @returns {T} */
export function useOnce(make) {
  const held = useRef(/** @type {any} */ (null));
  held.current ??= make();
  return held.current;
}

/** A name for a request: its id as asked, else its hash. @param {{id: string, rid: string|null}} row */
export const nameOf = (row) => row.rid ?? row.id;
