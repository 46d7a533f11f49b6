// Tool-call and reasoning parsers on a text, chunk by chunk.

import { html, useEffect, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { Choice, Failed, Field, NumberField, readJson, useFields, useWork } from "../lib/form.js";
import { visible } from "../lib/generate.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";

const ROUTES = {
  tools: { path: "parse_function_call", field: "tool_call_parser", schema: "ParseFunctionCall" },
  reasoning: { path: "separate_reasoning", field: "reasoning_parser", schema: "SeparateReasoning" },
};
const EXAMPLE = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>';

/** Names of the parsers, of the OpenAPI document. */
function useNames() {
  const [names, setNames] = useState({ tools: [], reasoning: [] });
  useEffect(() => {
    api("openapi.json").then((document) => {
      const of = (kind) => document.components.schemas[ROUTES[kind].schema].properties[ROUTES[kind].field].examples ?? [];
      setNames({ tools: of("tools"), reasoning: of("reasoning") });
    }, () => {});
  }, []);
  return names;
}

export default function Parsers() {
  const [values, bind, set] = useFields({ kind: "tools", name: "", chunk: "8", text: EXAMPLE, tools: "" });
  const [got, setGot] = useState(null);
  const names = useNames();
  const work = useWork();
  const route = ROUTES[values.kind];
  const submit = (event) => {
    event.preventDefault();
    work.start(async (signal) => {
      const body = { text: values.text, chunk_chars: Math.max(1, Math.round(Number(values.chunk)) || 1) };
      if (values.name) body[route.field] = values.name;
      if (values.kind === "tools" && values.tools.trim()) body.tools = readJson(values.tools, "tools");
      setGot({ kind: values.kind, ...(await api(route.path, { body, signal })) });
    });
  };
  const kinds = ["tools", "reasoning"].map((kind) => [kind, t(`play.parse.${kind}`)]);
  const options = [["", t("play.parse.model")], ...names[values.kind].map((name) => [name, name])];
  const kindBind = { value: values.kind, onInput: (event) => set({ kind: event.currentTarget.value, name: "" }) };
  return html`<p class="muted">${t("play.parse.about")}</p>
    <form class="ask" onSubmit=${submit}>
      <div class="fields"><${Choice} label=${t("play.parse.kind")} bind=${kindBind} options=${kinds} />
        <${Choice} label=${t("play.parse.name")} bind=${bind("name")} options=${options} />
        <${NumberField} label=${t("play.parse.chunk")} bind=${bind("chunk")} min="1" /></div>
      <${Field} label=${t("play.parse.text")}><textarea class="mono" rows="6" spellcheck=${false} ...${bind("text")}></textarea></${Field}>
      ${values.kind === "tools" && html`<${Field} label=${t("play.parse.schemas")}>
        <textarea class="mono" rows="3" spellcheck=${false} ...${bind("tools")}></textarea></${Field}>`}
      <div class="row"><button class="primary" disabled=${work.busy}>${t("play.parse.run")}</button></div>
    </form>
    <${Failed} error=${work.error} />
    ${got && html`<${Steps} got=${got} />`}`;
}

const callText = (calls) => calls.map((one) => `${one.tool_index}: ${one.name ? `${one.name} ` : ""}${one.parameters}`).join("\n");

function Steps({ got }) {
  const isTools = got.kind === "tools";
  const code = (value) => html`<code class="wrap">${visible(value)}</code>`;
  const shown = (value) => (value ? code(value) : "");
  const columns = [
    { key: "n", label: t("play.col.step"), num: true },
    { key: "chunk", label: t("play.col.chunk"), format: (value, row) => (row.isEnd ? html`<em>${t("play.parse.end")}</em>` : code(value)) },
    { key: "text", label: t("play.col.content"), format: shown },
    isTools ? { key: "calls", label: t("play.col.calls"), format: shown } : { key: "reasoning", label: t("play.col.reasoning"), format: shown },
  ];
  const rows = got.steps.map((step, index) => ({
    n: index + 1,
    isEnd: index === got.steps.length - 1,
    chunk: step.chunk,
    text: isTools ? step.normal_text : step.text,
    calls: isTools ? callText(step.calls) : "",
    reasoning: step.reasoning_text,
  }));
  const name = got.tool_call_parser ?? got.reasoning_parser;
  return html`<section class="output"><p class="summary" role="status">${t("play.parse.used", { name, steps: rows.length - 1 })}</p>
    <h2>${t("play.parse.whole")}</h2>
    <dl class="pairs">
      <dt>${t("play.col.content")}</dt><dd><code class="wrap">${visible(isTools ? got.normal_text : got.text)}</code></dd>
      ${isTools
        ? html`<dt>${t("play.col.calls")}</dt><dd><code class="wrap">${got.calls.length ? callText(got.calls) : "–"}</code></dd>`
        : html`<dt>${t("play.col.reasoning")}</dt><dd><code class="wrap">${visible(got.reasoning_text)}</code></dd>`}
    </dl>
    <${DataTable} caption=${t("play.parse.steps")} columns=${columns} rows=${rows} /></section>`;
}
