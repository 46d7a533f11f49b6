import { html } from "../vendor/preact.js";

export const title = "Workers";

export default function View() {
  return html`<section class="page"><h1>Workers</h1></section>`;
}
