// What is asked in the playground: prompt, sampling, grammar.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Choice, Field, NumberField } from "../lib/form.js";
import { checkGrammar } from "../lib/generate.js";
import { t } from "../messages.js";

const CHECK_AFTER_MS = 300;
const KINDS = ["", "json_schema", "regex", "ebnf", "lark"];
const EXAMPLES = {
  json_schema: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
  regex: "(yes|no)(, [a-z]+)*",
  ebnf: 'root ::= ("yes" | "no") " " word\nword ::= [a-z]+',
  lark: "start: /[A-Z][a-z]+/ (\" \" /[a-z]+/)*",
};

/** @param {{values: any, bind: (name: string) => any}} props */
export function Prompt({ values, bind }) {
  const modes = [["text", t("play.mode.text")], ["chat", t("play.mode.chat")]];
  return html`<fieldset><legend class="visually-hidden">${t("play.mode")}</legend>
    <${Choice} label=${t("play.mode")} bind=${bind("mode")} options=${modes} />
    ${values.mode === "chat"
      ? html`<${Field} label=${t("play.system")}><input ...${bind("system")} /></${Field}>
          <${Field} label=${t("play.user")}><textarea rows="3" ...${bind("user")}></textarea></${Field}>`
      : html`<${Field} label=${t("play.text")}><textarea rows="4" ...${bind("text")}></textarea></${Field}>`}
  </fieldset>`;
}

/** What is tokenized for the values of Prompt. */
export function promptOf(values) {
  if (values.mode !== "chat") return { prompt: values.text };
  const system = values.system.trim() ? [{ role: "system", content: values.system }] : [];
  return { messages: [...system, { role: "user", content: values.user }] };
}

export const PROMPT = { mode: "text", text: "The capital of France is", system: "", user: "" };

/** @param {{bind: (name: string) => any}} props */
export function Sampling({ bind }) {
  return html`<div class="fields">
    <${NumberField} label=${t("play.max")} bind=${bind("max")} min="1" max="2048" />
    <${NumberField} label=${t("play.temperature")} bind=${bind("temperature")} min="0" max="5" step="0.1" />
    <${NumberField} label=${t("play.top_p")} bind=${bind("top_p")} min="0.01" max="1" step="0.01" />
    <${NumberField} label=${t("play.seed")} bind=${bind("seed")} placeholder=${t("play.seed.none")} />
    <${NumberField} label=${t("play.top")} bind=${bind("top")} min="1" max="50" />
  </div>`;
}

/** A grammar, checked while one types. @param {{values: any, bind: any, set: any}} props */
export function GrammarField({ values, bind, set }) {
  const kinds = KINDS.map((kind) => [kind, t(`play.grammar.${kind}`)]);
  const area = useRef(null);
  const check = useCheck(values.kind, values.value);
  const choose = (event) => {
    const kind = event.currentTarget.value;
    const isExample = !values.value || Object.values(EXAMPLES).includes(values.value);
    set({ kind, ...(isExample ? { value: EXAMPLES[kind] ?? "" } : {}) });
  };
  const go = ({ line, column }) => {
    const before = values.value.split("\n").slice(0, line - 1).join("\n");
    const start = before.length + (line > 1 ? 1 : 0) + column - 1;
    area.current.focus();
    area.current.setSelectionRange(start, start + 1);
  };
  return html`<div class="grammar">
    <${Choice} label=${t("play.grammar")} bind=${{ value: values.kind, onInput: choose }} options=${kinds} />
    ${values.kind && html`
      <${Field} label=${t("play.grammar.value", { kind: t(`play.grammar.${values.kind}`) })}>
        <textarea ref=${area} class="mono" rows="4" spellcheck=${false} ...${bind("value")}
          aria-invalid=${check?.ok === false ? "true" : null} aria-describedby="grammar-check"></textarea>
      </${Field}>
      <div id="grammar-check" role="status" class=${`check ${check ? (check.ok ? "ok" : "bad") : ""}`}>
        ${check ? html`<${Checked} check=${check} onGo=${go} />` : t("play.grammar.checking")}
      </div>`}
  </div>`;
}

function Checked({ check, onGo }) {
  if (check.ok) {
    return html`✓ ${t("play.grammar.ok")} ${check.warnings.map((text) => html`<p>${t("play.grammar.warning", { text })}</p>`)}`;
  }
  return html`<pre>✗ ${check.message}</pre>
    ${check.position && html`<button type="button" class="small" onClick=${() => onGo(check.position)}>
      ${t("play.grammar.place", check.position)}</button>`}`;
}

/** The server's word on a grammar; null while it is asked. */
function useCheck(kind, value) {
  const [told, setTold] = useState(null);
  useEffect(() => {
    setTold(null);
    if (!kind || !value.trim()) return undefined;
    const gone = new AbortController();
    const timer = setTimeout(() => {
      checkGrammar({ kind, value }, gone.signal).then(setTold, (error) => {
        if (!gone.signal.aborted) setTold({ ok: false, message: error.message, position: null, warnings: [] });
      });
    }, CHECK_AFTER_MS);
    return () => {
      clearTimeout(timer);
      gone.abort();
    };
  }, [kind, value]);
  return told;
}
