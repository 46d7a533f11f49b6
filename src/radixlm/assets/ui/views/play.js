// The playground: panes by address (#/play/diff, #/play/tokenizer, ...).

import "./play_messages.js";
import { html } from "../vendor/preact.js";
import { t } from "../messages.js";
import Diff from "./play_diff.js";
import Parsers from "./play_parsers.js";
import Scores from "./play_scores.js";
import Tokenizer from "./play_tokenizer.js";
import Tokens from "./play_tokens.js";

export const title = "Playground";

const PANES = { tokens: Tokens, diff: Diff, parsers: Parsers, tokenizer: Tokenizer, scores: Scores };

/** @param {{store: any, path: string}} props */
export default function Play({ store, path }) {
  const name = path in PANES ? path : "tokens";
  const Pane = PANES[name];
  return html`<section class="page play">
    <h1>${title}</h1>
    <nav class="panes" aria-label=${t("play.panes")}>${Object.keys(PANES).map((one) => html`
      <a key=${one} href=${`#/play/${one}`} aria-current=${one === name ? "page" : null}>${t(`play.${one}`)}</a>`)}
    </nav>
    <${Pane} key=${name} store=${store} />
  </section>`;
}
