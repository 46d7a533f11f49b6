import { html } from "../vendor/preact.js";

export const title = "Tree";

export default function View() {
  return html`<section class="page"><h1>Tree</h1></section>`;
}
