// Every option with its value, and why it has it.

import { html, useState } from "../vendor/preact.js";
import { Choice, Field, useFields } from "../lib/form.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";

const shown = (value) => (value === null ? "–" : typeof value === "string" ? value || '""' : JSON.stringify(value));

function why(option) {
  if (option.reason) return t("server.was", { was: option.was, reason: option.reason });
  return t(option.is_given ? "server.given" : "server.default");
}

/** @param {{options: any[]}} props the options of /server_details */
export function Options({ options }) {
  const [values, bind] = useFields({ show: "changed", filter: "" });
  const wanted = { changed: (one) => one.is_given || one.reason || !one.is_default, given: (one) => one.is_given, all: () => true };
  const word = values.filter.trim().toLowerCase().replace(/^-+/, "").replace(/-/g, "_");
  const rows = options.filter((one) => wanted[values.show](one) && (!word || `${one.name} ${one.group}`.includes(word)));
  const columns = [
    { key: "flag", label: t("server.flag"), sort: true, format: (flag) => html`<code>${flag}</code>` },
    { key: "value", label: t("server.value"), text: true, format: (value) => html`<code class="wrap">${shown(value)}</code>` },
    { key: "reason", label: t("server.origin"), text: true, format: (_, row) => why(row) },
  ];
  const choices = ["changed", "given", "all"].map((name) => [name, t(`server.show.${name}`)]);
  return html`<div class="fields"><${Choice} label=${t("server.show")} bind=${bind("show")} options=${choices} />
      <${Field} label=${t("server.filter")}><input type="search" ...${bind("filter")} /></${Field}></div>
    <${DataTable} caption=${t("server.options")} hideCaption=${true} columns=${columns} rows=${rows} rowKey=${(row) => row.name} empty=${t("server.options.none")} />`;
}
