import { html } from "../vendor/preact.js";

export const title = "Playground";

export default function View() {
  return html`<section class="page"><h1>Playground</h1></section>`;
}
