import { html } from "../vendor/preact.js";

export const title = "Server";

export default function View() {
  return html`<section class="page"><h1>Server</h1></section>`;
}
