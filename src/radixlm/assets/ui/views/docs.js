// The API: routes by tag, their fields, and a form to try each.

import "./docs_messages.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { Failed, Field, useFields, useWork } from "../lib/form.js";
import { answerOf, bodyOf, fieldsOf, routesByTag, typeOf } from "../lib/openapi.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";
import { Try } from "./docs_try.js";

export const title = "API";

export default function Docs({ path }) {
  const [document, setDocument] = useState(null);
  const [values, bind] = useFields({ filter: path });
  const work = useWork();
  useEffect(() => {
    work.start(async (signal) => setDocument(await api("openapi.json", { signal })));
    return work.stop;
  }, []);
  return html`<section class="page docs"><h1>${title}</h1><p class="muted">${t("docs.about")}</p>
    <${Failed} error=${work.error} />
    ${document && html`<${Field} label=${t("docs.filter")}><input type="search" ...${bind("filter")} /></${Field}>
      <${Groups} document=${document} word=${values.filter.trim().toLowerCase()} />`}</section>`;
}

function Groups({ document, word }) {
  const groups = [...routesByTag(document)];
  const fits = (route) => `${route.method} ${route.path} ${route.summary}`.toLowerCase().includes(word);
  const kept = groups.map(([tag, routes]) => [tag, routes.filter(fits)]).filter(([, routes]) => routes.length);
  const sum = (rows) => rows.reduce((total, [, routes]) => total + routes.length, 0);
  return html`<p class="summary" role="status">${t("docs.count", { shown: sum(kept), all: sum(groups) })}</p>
    ${kept.map(([tag, routes]) => html`<section key=${tag} aria-label=${tag}><h2>${tag}</h2>
      ${routes.map((route) => html`<${Route} key=${`${route.method} ${route.path}`} document=${document} route=${route} />`)}</section>`)}`;
}

function Route({ document, route }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="route" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><span class=${`method ${route.method}`}>${route.method.toUpperCase()}</span>
      <code class="path">${route.path}</code><span class="about">${marked(route.summary)}</span></summary>
    ${isOpen && html`<${Details} document=${document} route=${route} />`}</details>`;
}

/** Words between double backticks as code. */
const marked = (text) => text.split("``").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));

function Fields({ caption, rows }) {
  const code = (value) => (value ? html`<code class="wrap">${value}</code>` : "");
  const columns = [
    { key: "name", label: t("docs.field"), format: code },
    { key: "type", label: t("docs.type"), text: true, format: code },
    { key: "default", label: t("docs.default"), format: (value) => (value === null ? html`<strong>${t("docs.required")}</strong>` : code(value)) },
    { key: "what", label: t("docs.what"), text: true, format: (value) => value },
  ];
  const shown = columns.filter(({ key }) => rows.some((row) => row[key] || (key === "default" && row[key] === null)));
  return html`<h3>${caption}</h3><${DataTable} caption=${caption} hideCaption=${true} columns=${shown} rows=${rows} rowKey=${(row) => row.name} />`;
}

function Details({ document, route }) {
  const body = bodyOf(document, route.operation);
  const answer = fieldsOf(document, answerOf(document, route.operation)).map(({ name, type, what }) => ({ name, type, what, default: "" }));
  const parameters = (route.operation.parameters ?? []).map((one) => ({
    name: one.name,
    where: one.in,
    type: `${typeOf(document, one.schema)} (${one.in})`,
    default: one.required ? null : JSON.stringify(one.schema?.default ?? null),
    what: one.description ?? "",
  }));
  const fields = body ? fieldsOf(document, body.schema) : [];
  return html`<div>
    ${body?.schema.description && html`<p class="about">${marked(body.schema.description)}</p>`}
    ${parameters.length > 0 && html`<${Fields} caption=${t("docs.parameters")} rows=${parameters} />`}
    ${fields.length > 0 && html`<${Fields} caption=${t("docs.fields")} rows=${fields} />`}
    ${answer.length > 0 && html`<${Fields} caption=${t("docs.answer")} rows=${answer} />`}
    <${Try} route=${route} parameters=${parameters} example=${body?.example ?? null} /></div>`;
}
