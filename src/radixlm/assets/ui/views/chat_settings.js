// The drawer of the chat: model, system prompts, tools, structured output, every sampling field.

import { html, useEffect, useState } from "../vendor/preact.js";
import { t } from "../messages.js";
import { FIELDS, read, write } from "./chat_options.js";

const FORMATS = ["none", "json_object", "json_schema", "regex", "ebnf", "choice"];
const EXAMPLE = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather", description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}], null, 2);

/** @param {{chats: import("./chat_model.js").Chats, models: string[], onClose: () => void}} props */
export function Settings({ chats, models, onClose }) {
  const { talk } = chats;
  const { settings } = talk;
  const set = (name) => (event) => {
    settings[name] = event.currentTarget.value;
    chats.save(talk);
  };
  const reset = () => {
    settings.sampling = {};
    chats.save(talk);
  };
  return html`<aside class="chat-settings" aria-label=${t("chat.settings")}>
    <div class="row"><h2 class="grow">${t("chat.settings")}</h2>
      <button class="quiet icon" aria-label=${t("set.close")} onClick=${onClose}>✕</button></div>
    <label>${t("set.model")}
      <select value=${settings.model} onChange=${set("model")}>
        <option value="">${t("set.default")}</option>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>
    <label>${t("set.system")}
      <textarea rows="3" value=${settings.system} onInput=${set("system")}></textarea></label>
    <${Library} chats=${chats} />
    <${Area} label=${t("set.tools")} value=${settings.tools} rows=${4} onInput=${set("tools")} isJson />
    <div class="row">
      <label class="grow">${t("set.tool_choice")}
        <select value=${settings.tool_choice} onChange=${set("tool_choice")}>
          ${["auto", "required", "none"].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>
      ${!settings.tools && html`<button class="small bottom" onClick=${() => {
        settings.tools = EXAMPLE;
        chats.save(talk);
      }}>${t("set.example")}</button>`}
    </div>
    <label>${t("set.format")}
      <select value=${settings.format} onChange=${set("format")}>
        ${FORMATS.map((name) => html`<option key=${name} value=${name}>${t(`format.${name}`)}</option>`)}
      </select></label>
    ${!["none", "json_object"].includes(settings.format) && html`<${Area} label=${t("set.schema")}
      value=${settings.schema} rows=${5} onInput=${set("schema")} isJson=${settings.format === "json_schema"} />`}
    <label>${t("set.thinking")}
      <select value=${settings.thinking} onChange=${set("thinking")}>
        <option value="">${t("set.default")}</option>
        <option value="on">${t("set.on")}</option><option value="off">${t("set.off")}</option>
      </select></label>
    ${FIELDS.map(([group, fields]) => html`<details key=${group} open=${group === "sampling"}>
      <summary>${t(`set.${group}`)}</summary>
      <div class="fields">${fields.map(([name, kind, byDefault]) => html`<${Field}
        key=${talk.id + name} name=${name} kind=${kind} byDefault=${byDefault} chats=${chats} />`)}</div>
    </details>`)}
    <button class="small" onClick=${reset}>${t("set.reset")}</button>
  </aside>`;
}

/** A text area that says when its JSON cannot be read. */
function Area({ label, value, rows, onInput, isJson = false }) {
  let problem = "";
  if (isJson && value.trim()) {
    try {
      JSON.parse(value);
    } catch (error) {
      problem = error.message;
    }
  }
  return html`<label>${label}
    <textarea class="mono" rows=${rows} spellcheck=${false} value=${value} onInput=${onInput}
      aria-invalid=${problem ? "true" : null}></textarea>
    ${problem && html`<span class="problem small" role="alert">${problem}</span>`}</label>`;
}

function Field({ name, kind, byDefault, chats }) {
  const { sampling } = chats.talk.settings;
  const kept = write(kind, sampling[name]);
  const [text, setText] = useState(kept);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (!problem) setText(kept);
  }, [kept]);
  const change = (event) => {
    const typed = event.currentTarget.value;
    setText(typed);
    try {
      const value = read(kind, typed);
      if (value === undefined) delete sampling[name];
      else sampling[name] = value;
      setProblem("");
      chats.save(chats.talk);
    } catch (error) {
      setProblem(t("set.must", { what: error.message }));
    }
  };
  const invalid = problem ? "true" : null;
  const input = kind === "boolean"
    ? html`<select value=${text} onChange=${change}><option value="">${t("set.default")}: ${byDefault}</option>
        <option value="true">${t("set.true")}</option><option value="false">${t("set.false")}</option></select>`
    : kind === "lines"
      ? html`<textarea rows="1" value=${text} placeholder=${byDefault} onInput=${change}></textarea>`
      : html`<input value=${text} placeholder=${byDefault} onInput=${change} spellcheck=${false}
          inputmode=${kind === "number" || kind === "integer" ? "decimal" : null} aria-invalid=${invalid} />`;
  return html`<label class=${kept ? "is-set" : ""}><code>${name}</code>${input}
    ${problem && html`<span class="problem small" role="alert">${problem}</span>`}</label>`;
}

function Library({ chats }) {
  const [name, setName] = useState("");
  const { talk, prompts } = chats;
  const choose = (event) => {
    const found = prompts.find((prompt) => prompt.id === event.currentTarget.value);
    if (!found) return;
    talk.settings.system = found.text;
    setName(found.id);
    chats.save(talk);
  };
  const id = name.trim();
  return html`<fieldset class="library"><legend>${t("set.library")}</legend>
    ${prompts.length > 0 && html`<select aria-label=${t("set.library")} value="" onChange=${choose}>
      <option value="">${t("set.choose")}</option>
      ${prompts.map((prompt) => html`<option key=${prompt.id} value=${prompt.id}>${prompt.id}</option>`)}
    </select>`}
    <div class="row nowrap">
      <input aria-label=${t("set.name")} placeholder=${t("set.name")} value=${name} onInput=${(e) => setName(e.currentTarget.value)} />
      <button class="small" disabled=${!id || !talk.settings.system.trim()}
        onClick=${() => chats.keepPrompt(id, talk.settings.system)}>${t("set.save")}</button>
      <button class="small" disabled=${!prompts.some((prompt) => prompt.id === id)}
        onClick=${() => chats.keepPrompt(id, "")}>${t("set.delete")}</button>
    </div></fieldset>`;
}
