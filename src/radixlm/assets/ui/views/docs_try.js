// A form that sends a request to a route and shows the answer.

import { html, useState } from "../vendor/preact.js";
import { keys, ROOT } from "../http.js";
import { Failed, Field, readJson, useFields, useWork } from "../lib/form.js";
import { t } from "../messages.js";

const MAX_SHOWN = 100_000; // characters of an answer
const SHOW_MS = 100; // how often an answer under way is shown

/** The address of a call, with its parameters in place. */
function addressOf(route, parameters, values) {
  let path = route.path.slice(1);
  const query = new URLSearchParams();
  for (const { name, where } of parameters) {
    const value = values[name] ?? "";
    if (where === "path") path = path.replace(new RegExp(`\\{${name}(:path)?\\}`), encodeURIComponent(value));
    else if (where === "query" && value !== "") query.set(name, value);
  }
  const url = new URL(path, ROOT);
  url.search = query.toString();
  return url;
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The call as a command; the key stands in a variable. */
export function curlOf(method, url, body, hasKey) {
  const parts = ["curl", "-sS", ...(method === "GET" ? [] : ["-X", method]), quote(String(url))];
  if (hasKey) parts.push("-H", '"Authorization: Bearer $RADIXLM_KEY"');
  if (body !== null) parts.push("-H", quote("Content-Type: application/json"), "-d", quote(body));
  return parts.join(" ");
}

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

/** @param {{route: any, parameters: any[], example: string | null}} props */
export function Try({ route, parameters, example }) {
  const [values, bind] = useFields({ "": example ?? "", ...Object.fromEntries(parameters.map((one) => [one.name, ""])) });
  const [got, setGot] = useState(null);
  const work = useWork();
  const method = route.method.toUpperCase();
  const body = example === null || method === "GET" ? null : values[""];
  const send = (event) => {
    event.preventDefault();
    work.start(async (signal) => {
      if (body?.trim()) readJson(body, t("docs.body"));
      const key = keys.get();
      const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body !== null && { "Content-Type": "application/json" }) };
      const began = performance.now();
      const response = await fetch(addressOf(route, parameters, values), { method, headers, body, signal, credentials: "omit", cache: "no-store" });
      await follow(response, (text, isWhole) => setGot({
        status: response.status, ms: Math.round(performance.now() - began), id: response.headers.get("x-request-id"),
        text: isWhole ? pretty(text) : text,
      }));
    });
  };
  return html`<h3>${t("docs.try")}</h3><form class="try" onSubmit=${send}>
    <div class="fields">${parameters.filter((one) => one.where !== "header").map((one) => html`
      <${Field} key=${one.name} label=${one.name}><input ...${bind(one.name)} required=${one.where === "path"} /></${Field}>`)}</div>
    ${body !== null && html`<${Field} label=${t("docs.body")}><textarea class="mono" rows="6" spellcheck=${false} ...${bind("")}></textarea></${Field}>`}
    <div class="row"><button class="primary" disabled=${work.busy}>${t("docs.send", { method, path: route.path })}</button>
      ${work.busy && html`<button type="button" onClick=${work.stop}>${t("docs.stop")}</button>`}</div>
    <details><summary>${t("docs.curl")}</summary><pre class="scroll" tabindex="0">${curlOf(method, addressOf(route, parameters, values), body, !!keys.get())}</pre></details>
  </form>
  <${Failed} error=${work.error} />
  <p role="status" class="summary">${got ? `${t("docs.status", got)}${got.id ? ` · ${got.id}` : ""}` : ""}</p>
  ${got && html`<pre class="scroll" tabindex="0" role="region" aria-label=${t("docs.response")}>${got.text}</pre>`}`;
}

/** Show an answer as it comes. @param {Response} response @param {(text: string, isWhole: boolean) => void} show */
async function follow(response, show) {
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let last = 0;
  for (;;) {
    const part = reader ? await reader.read() : { done: true };
    if (part.done) break;
    text += part.value;
    if (text.length > MAX_SHOWN) {
      await reader.cancel();
      show(text.slice(0, MAX_SHOWN) + t("docs.cut", { size: MAX_SHOWN.toLocaleString("en") }), false);
      return;
    }
    if (performance.now() - last > SHOW_MS) {
      last = performance.now();
      show(text, false);
    }
  }
  show(text, true);
}
