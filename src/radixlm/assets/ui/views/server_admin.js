// What changes the server: adapters, the cache, pauses. Each asks first.

import { html, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { Ask } from "../lib/confirm.js";
import { Failed, Field, useFields, useWork } from "../lib/form.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";

const ACTIONS = [
  ["server.flush", "flush_cache", {}],
  ["server.pause", "pause_generation", { mode: "in_place" }],
  ["server.continue", "continue_generation", {}],
];

export function Administration() {
  const [done, setDone] = useState("");
  const work = useWork();
  const act = (label, path, body) => work.start(async (signal) => {
    setDone("");
    await api(path, { method: "POST", body, signal });
    setDone(t("server.done", { what: label }));
  });
  return html`<div class="row">${ACTIONS.map(([name, path, body]) => html`<${Ask} key=${name} label=${t(name)}
      ask=${t(`${name}.ask`)} disabled=${work.busy} onYes=${() => act(t(name), path, body)} />`)}</div>
    <p role="status" class="summary">${done}</p><${Failed} error=${work.error} />
    <p class="muted">${t("server.drain")}</p>`;
}

/** @param {{isOn: boolean, models: any[], onChange: () => void}} props `models`: of /v1/models */
export function Adapters({ isOn, models, onChange }) {
  const [values, bind, set] = useFields({ name: "", path: "" });
  const [done, setDone] = useState("");
  const work = useWork();
  if (!isOn) return html`<p class="muted">${t("server.adapters.off")}</p>`;
  const act = (path, body, word) => work.start(async (signal) => {
    setDone("");
    await api(path, { method: "POST", body, signal });
    setDone(t(word, { name: body.lora_name }));
    set({ name: "", path: "" });
    onChange();
  });
  const load = (event) => {
    event.preventDefault();
    act("load_lora_adapter", { lora_name: values.name.trim(), lora_path: values.path.trim() }, "server.loaded");
  };
  const columns = [
    { key: "id", label: t("server.adapter") },
    { key: "root", label: t("server.path"), text: true },
    { key: "parent", label: t("server.unload"), format: (_, row) => html`<${Ask} label=${t("server.unload")} disabled=${work.busy}
      ask=${t("server.unload.ask", { name: row.id })} onYes=${() => act("unload_lora_adapter", { lora_name: row.id }, "server.unloaded")} />` },
  ];
  return html`<${DataTable} caption=${t("server.adapters")} hideCaption=${true} columns=${columns} rowKey=${(row) => row.id}
      rows=${models.filter((one) => one.parent)} empty=${t("server.adapters.none")} />
    <form class="fields" onSubmit=${load}>
      <${Field} label=${t("server.adapter.name")}><input required ...${bind("name")} /></${Field}>
      <${Field} label=${t("server.adapter.path")} class="long"><input required ...${bind("path")} /></${Field}>
      <button disabled=${work.busy}>${t("server.load")}</button></form>
    <p role="status" class="summary">${done}</p><${Failed} error=${work.error} />`;
}
