import { html } from "../vendor/preact.js";

export const title = "Live";

export default function View() {
  return html`<section class="page"><h1>Live</h1></section>`;
}
