// The server: what runs, with which options and why, and what an operator may change.

import "./server_messages.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { api, ROOT } from "../http.js";
import { Failed, useWork } from "../lib/form.js";
import { bytes, count, percent, seconds } from "../lib/format.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";
import { Adapters, Administration } from "./server_admin.js";
import { Options } from "./server_options.js";
import { kernels, report } from "./server_report.js";

export const title = "Server";

export default function Server() {
  const [got, setGot] = useState(null);
  const work = useWork();
  const read = () => work.start(async (signal) => {
    const [details, info, models] = await Promise.all(["server_details", "server_info", "v1/models"].map((path) => api(path, { signal })));
    setGot({ details, info, models: models.data });
  });
  useEffect(() => {
    read();
    return work.stop;
  }, []);
  return html`<section class="page server"><div class="row"><h1>${title}</h1><span class="grow"></span>
      <button disabled=${work.busy} onClick=${read}>${t("server.reload")}</button>${got && html`<${Report} ...${got} />`}</div>
    <${Failed} error=${work.error} />
    ${got && html`<${Sections} ...${got} onChange=${read} />`}</section>`;
}

/** Copies the report, or shows it where the browser does not let it (no HTTPS). */
function Report({ details, info }) {
  const [state, setState] = useState("");
  const text = report(details, info);
  const copy = () => {
    const written = navigator.clipboard?.writeText(text) ?? Promise.reject();
    written.then(() => setState("copied"), () => setState("shown"));
  };
  return html`<button class="primary" onClick=${copy}>${t("server.report")}</button>
    <div role="status" class="report">${state && html`<p class="summary">${t(`server.report.${state}`)}</p>`}
      ${state === "shown" && html`<textarea readonly rows="12" class="mono" aria-label=${t("server.report")} value=${text}></textarea>`}</div>`;
}

const Section = ({ name, children }) => html`<div class=${`panel ${name}`}>
  <h2>${t(`server.${name}`)}</h2>${children}</div>`;

const Pairs = ({ pairs }) => html`<dl class="pairs">${pairs.filter(([, value]) => value !== null && value !== "" && value !== undefined)
  .map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;

function Sections({ details, info, models, onChange }) {
  const { model, machine, packages, options } = details;
  const value = (name) => options.find((one) => one.name === name)?.value;
  const gpu = info.engine?.gpu;
  return html`<div class="sections">
    <${Section} name="model"><${Model} model=${model} info=${info} /></${Section}>
    <${Section} name="memory"><${Memory} info=${info} machine=${machine} /></${Section}>
    <${Section} name="machine"><${Pairs} pairs=${[
      ["Device", gpu ?? value("device")], ["Kernels", kernels(info)], ["Attention", value("attention_backend")],
      ["Sampling", value("sampling_backend")], ["Grammar", value("grammar_backend")], ["Processor", machine.processor],
      ["Cores", machine.cores], ["Platform", machine.platform], ["Loaded in", seconds(info.engine?.load_seconds)],
      ["Up", seconds(info.uptime_s)], ["State", info.status]]} /></${Section}>
    <${Section} name="versions"><${Pairs} pairs=${[["RadixLM", details.version], ["Python", machine.python], ...Object.entries(packages)]} /></${Section}>
  </div>
  <${Section} name="options"><${Options} options=${options} /></${Section}>
  <${Section} name="adapters"><${Adapters} isOn=${!!value("enable_lora")} models=${models} onChange=${onChange} /></${Section}>
  <${Section} name="admin"><${Administration} /></${Section}>
  <${Section} name="metrics"><${Metrics} isOn=${!!value("enable_metrics")} /></${Section}>
  <${Section} name="links"><ul>
    <li><a href="#/docs">${t("server.api")}</a></li>
    ${[["openapi.json", "openapi"], ["server_info", "info"], ["health", "health"]].map(([path, name]) => html`
      <li><a href=${new URL(path, ROOT).pathname}>${t(`server.${name}`)}</a></li>`)}
  </ul></${Section}>`;
}

/** Rows of equal layers in words: "4 × Attention (heads 4, kv_heads 2), Mlp (inner 512)". */
function layers(rows) {
  return rows.map(({ layers: number, ...row }) => {
    const sizes = Object.entries(row).filter(([name]) => name !== "mixer" && name !== "ffn").map(([name, size]) => `${name} ${size}`);
    return `${number} × ${[row.mixer, row.ffn].filter(Boolean).join(" + ")} (${sizes.join(", ")})`;
  });
}

function Model({ model, info }) {
  const stored = model.stored;
  const kinds = Object.entries(stored?.bytes_by_kind ?? {});
  const columns = [{ key: "kind", label: t("server.kind") }, { key: "bytes", label: t("server.bytes"), num: true }, { key: "share", label: t("server.share"), num: true }];
  return html`<${Pairs} pairs=${[
      ["Name", model.name], ["Architecture", model.architecture], ["Context", `${count(model.context_len)} tokens`],
      ["Vocabulary", model.vocab], ["Width", model.dim],
      [t("server.layers"), html`${layers(model.layer_kinds).map((text) => html`<div>${text}</div>`)}`],
      ["Parameters", stored && count(stored.parameters)],
      ["Types", stored && Object.entries(stored.bytes_by_dtype).map(([name, size]) => `${name} ${bytes(size)}`).join(", ")],
      ["Tool calls", model.tool_call_parser ?? "–"], ["Reasoning", model.reasoning_parser ?? "–"],
      ["Media", model.modalities.join(", ") || "–"], ["Weight version", info.weights?.version]]} />
    ${stored && html`<${DataTable} caption=${t("server.kinds")} columns=${columns}
      rows=${kinds.map(([kind, size]) => ({ kind, bytes: bytes(size), share: percent(size / stored.bytes) }))} />`}`;
}

function Memory({ info, machine }) {
  const engine = info.engine ?? {};
  const used = info.internal_states?.[0]?.memory_usage ?? {};
  const graphs = Object.values(used.graph ?? {}).reduce((sum, each) => sum + each, 0);
  const tokens = info.max_total_num_tokens;
  const each = engine.kv_bytes && tokens ? bytes(engine.kv_bytes / tokens) : "–";
  const rows = [
    [t("server.weights"), engine.weight_bytes, used.weight_mapped ? `${used.weight_mapped} GiB mapped` : ""],
    [t("server.kv"), engine.kv_bytes, t("server.kv.note", { tokens: count(tokens), page: engine.kv_page_size ?? "–", each })],
    graphs ? [t("server.graphs"), graphs * 2 ** 30, ""] : null,
    used.rss_bytes ? [t("server.rss"), used.rss_bytes, t("server.rss.note", { shared: bytes(used.rss_shared_bytes) })] : null,
    [t("server.host"), machine.memory_bytes, t("server.host.note", { free: bytes(machine.memory_available_bytes) })],
  ].filter(Boolean).map(([what, size, note]) => [what, bytes(size), note]);
  const columns = [{ key: "what", label: t("server.col.what") }, { key: "size", label: t("server.col.size"), num: true }, { key: "note", label: t("server.col.note"), text: true }];
  return html`<${DataTable} caption=${t("server.memory")} hideCaption=${true} columns=${columns} rows=${rows} />`;
}

function Metrics({ isOn }) {
  const [text, setText] = useState("");
  const box = useRef(null);
  const work = useWork();
  useEffect(() => box.current?.focus(), [text]);
  if (!isOn) return html`<p class="muted">${t("server.metrics.off")}</p>`;
  const read = () => work.start(async (signal) => setText(String(await api("metrics", { signal }))));
  return html`<button disabled=${work.busy} onClick=${read}>${t("server.metrics.read")}</button><${Failed} error=${work.error} />
    ${text && html`<pre ref=${box} class="scroll" tabindex="0" role="region" aria-label=${t("server.metrics.text")}>${text}</pre>`}`;
}
