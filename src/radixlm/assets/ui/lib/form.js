// Labelled fields, notes of errors, and work that can be stopped.

import { html, useRef, useState } from "../vendor/preact.js";

/**
 * Values by name: `[values, bind, set]`; `bind("x")` are the props of an input.
 * @param {Record<string, any>} initial
 */
export function useFields(initial) {
  const [values, setValues] = useState(initial);
  const set = (changed) => setValues((before) => ({ ...before, ...changed }));
  const bind = (name) => ({
    value: values[name],
    onInput: (event) => set({ [name]: event.currentTarget.value }),
  });
  return [values, bind, set];
}

/** @param {{label: string, hint?: string, class?: string, children: any}} props */
export const Field = ({ label, hint, class: name = "", children }) => html`
  <label class=${`field ${name}`}><span>${label}</span>${children}${hint && html`<small class="muted">${hint}</small>`}</label>`;

/** @param {{label: string, bind: any, hint?: string, min?: any, max?: any, step?: any, placeholder?: string}} props */
export const NumberField = ({ label, hint, bind, ...rest }) => html`
  <${Field} label=${label} hint=${hint} class="number"><input type="number" inputmode="decimal" ...${bind} ...${rest} /></${Field}>`;

/** @param {{label: string, bind: any, options: [string, string][]}} props */
export const Choice = ({ label, bind, options }) => html`
  <${Field} label=${label} class="choice"><select ...${bind} onChange=${bind.onInput}>
    ${options.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}
  </select></${Field}>`;

/** @param {{error: any}} props */
export const Failed = ({ error }) => error && html`
  <p class="failed" role="alert">${error.param ? html`<code>${error.param}</code>: ` : ""}${String(error.message ?? error)}</p>`;

/**
 * Work of which one runs at a time: `{busy, error, start, stop}`. `start(fn)` calls
 * `fn(signal)`; what it throws is `error`, unless it was stopped.
 */
export function useWork() {
  const [state, setState] = useState({ busy: false, error: null });
  const current = useRef(null);
  const stop = () => current.current?.abort();
  const start = async (work) => {
    stop();
    const mine = (current.current = new AbortController());
    setState({ busy: true, error: null });
    let error = null;
    try {
      await work(mine.signal);
    } catch (caught) {
      error = mine.signal.aborted ? null : caught;
    }
    if (current.current === mine) setState({ busy: false, error });
  };
  return { ...state, start, stop };
}

/** The numbers among `values`; fields that are empty are left out. @param {Record<string, any>} values */
export function numbers(values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value != null);
  return Object.fromEntries(given.map(([name, value]) => [name, Number(value)]));
}

/** A JSON value; the error names the field. @param {string} text @param {string} name */
export function readJson(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`not JSON: ${error.message}`), { param: name });
  }
}
