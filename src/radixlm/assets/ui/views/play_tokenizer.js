// How the model reads a text or messages: ids, bytes, special tokens.

import { html, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { Choice, Failed, Field, readJson, useFields, useWork } from "../lib/form.js";
import { visible } from "../lib/generate.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";

const MESSAGES = '[\n  {"role": "system", "content": "Be short."},\n  {"role": "user", "content": "Hi 👋"}\n]';
const MAX_ROWS = 2000;

const bytesOf = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
const textOf = (hex) => new TextDecoder().decode(bytesOf(hex));

export default function Tokenizer() {
  const [values, bind, set] = useFields({ kind: "text", text: "Tokens are pieces of words: 12,345 naïve 👋", messages: MESSAGES, adds: true, generation: true });
  const [got, setGot] = useState(null);
  const work = useWork();
  const submit = (event) => {
    event.preventDefault();
    work.start(async (signal) => {
      const body = values.kind === "text"
        ? { prompt: values.text, add_special_tokens: values.adds }
        : { messages: readJson(values.messages, "messages"), add_generation_prompt: values.generation };
      setGot(await api("tokenize", { body: { ...body, return_token_bytes: true, return_token_strs: true }, signal }));
    });
  };
  const box = (name, label) => html`<label class="check-label"><input type="checkbox" checked=${values[name]}
    onChange=${(event) => set({ [name]: event.currentTarget.checked })} /> ${label}</label>`;
  const kinds = [["text", t("play.mode.text")], ["messages", t("play.tok.messages")]];
  return html`<p class="muted">${t("play.tok.about")}</p>
    <form class="ask" onSubmit=${submit}>
      <${Choice} label=${t("play.tok.kind")} bind=${bind("kind")} options=${kinds} />
      ${values.kind === "text"
        ? html`<${Field} label=${t("play.mode.text")}><textarea rows="5" ...${bind("text")}></textarea></${Field}>${box("adds", t("play.tok.special"))}`
        : html`<${Field} label=${t("play.tok.messages")}><textarea class="mono" rows="7" spellcheck=${false} ...${bind("messages")}></textarea></${Field}>${box("generation", t("play.tok.generation"))}`}
      <div class="row"><button class="primary" disabled=${work.busy}>${t("play.tok.run")}</button></div>
    </form>
    <${Failed} error=${work.error} />
    ${got && html`<${Pieces} got=${got} />`}`;
}

function Pieces({ got }) {
  const sizes = got.token_bytes.map((hex) => hex.length / 2);
  const total = sizes.reduce((sum, one) => sum + one, 0);
  const special = got.special_tokens_mask.filter(Boolean).length;
  const ratio = (total / Math.max(got.count, 1)).toFixed(2);
  const rows = got.tokens.slice(0, MAX_ROWS).map((id, index) => ({
    n: index + 1,
    id,
    text: visible(textOf(got.token_bytes[index])),
    spelled: got.token_strs[index],
    bytes: got.token_bytes[index].replace(/..(?=.)/g, "$& "),
    kind: got.special_tokens_mask[index] ? t("play.tok.is_special") : "",
  }));
  const code = (value) => html`<code class="wrap">${value}</code>`;
  const columns = [
    { key: "n", label: t("play.col.n"), num: true }, { key: "id", label: t("play.col.id"), num: true },
    { key: "text", label: t("play.col.text"), format: code }, { key: "spelled", label: t("play.col.spelled"), format: code },
    { key: "bytes", label: t("play.col.bytes"), format: code }, { key: "kind", label: t("play.col.kind") },
  ];
  return html`<section class="output">
    <p class="summary" role="status">${t("play.tok.summary", { tokens: got.count, bytes: total, ratio, special })}</p>
    <h2>${t("play.tok.rendered")}</h2>
    <p class="pieces">${runs(got).map((run, index) => html`<span key=${index} class=${run.isSpecial ? "piece special" : `piece tone${index % 2}`}>${run.text}</span>`)}</p>
    <${DataTable} caption=${t("play.tok.table")} columns=${columns} rows=${rows} /></section>`;
}

/** The text in pieces of whole characters: tokens that share a character are shown as one. */
function runs(got) {
  const made = [];
  let held = "";
  got.token_bytes.slice(0, MAX_ROWS).forEach((hex, index) => {
    const isSpecial = !!got.special_tokens_mask[index];
    held += hex;
    const text = textOf(held);
    const isCut = text.endsWith("\ufffd") && !isSpecial && index < got.tokens.length - 1 && held.length < 16;
    if (isCut) return;
    made.push({ text, isSpecial });
    held = "";
  });
  return made;
}
