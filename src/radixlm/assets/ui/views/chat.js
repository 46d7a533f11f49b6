import { html } from "../vendor/preact.js";

export const title = "Chat";

export default function View() {
  return html`<section class="page"><h1>Chat</h1></section>`;
}
