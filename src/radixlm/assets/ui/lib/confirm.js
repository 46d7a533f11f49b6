// A button that asks before it acts, beside itself: no window.confirm, no trap for the keyboard.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { addMessages, t } from "../messages.js";

addMessages({ "confirm.yes": "Yes: {what}", "confirm.no": "Cancel" });

/**
 * The first press asks, with the focus on "Cancel", so that a key that is held down does nothing.
 * @param {{label: string, ask: string, no: string, yes: string, onYes: () => any, disabled?: boolean}} props
 */
export function Confirm({ label, ask, no, yes, onYes, disabled }) {
  const [isAsking, setAsking] = useState(false);
  const cancel = useRef(null);
  const first = useRef(null);
  const wasAsking = useRef(false);
  useEffect(() => {
    if (isAsking) cancel.current?.focus();
    else if (wasAsking.current) first.current?.focus();
    wasAsking.current = isAsking;
  }, [isAsking]);
  const keys = (event) => {
    if (event.key === "Escape") setAsking(false);
  };
  if (!isAsking) {
    return html`<button type="button" ref=${first} disabled=${disabled} onClick=${() => setAsking(true)}>${label}</button>`;
  }
  const act = () => {
    setAsking(false);
    onYes();
  };
  return html`<span class="confirm" role="group" aria-label=${ask} onKeyDown=${keys}><span>${ask}</span>
    <button type="button" class="primary" onClick=${act}>${yes}</button>
    <button type="button" ref=${cancel} onClick=${() => setAsking(false)}>${no}</button></span>`;
}

/** Confirm with the page's own words for yes and no. */
export const Ask = ({ label, ask, onYes, disabled }) => html`
  <${Confirm} label=${label} ask=${ask} yes=${t("confirm.yes", { what: label })} no=${t("confirm.no")} onYes=${onYes} disabled=${disabled} />`;
