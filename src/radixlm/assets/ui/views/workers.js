// The gateway's view: workers as rows, the index, the policy's choices, tenants.

import "./workers_messages.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { Ask } from "../lib/confirm.js";
import { Failed, useWork } from "../lib/form.js";
import { bytes, count, percent, seconds } from "../lib/format.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";

export const title = "Workers";

/** @param {{store: any}} props */
export default function Workers({ store }) {
  const [head, setHead] = useState(null);
  const [now, setNow] = useState(null);
  useEffect(() => store.subscribe(["head", "workers"], (topic, data) => {
    if (topic === "head") setHead(data);
    else if (topic === "workers") setNow(data);
  }), []);
  return html`<section class="page workers"><h1>${title}</h1>
    ${now ? html`<${Now} now=${now} head=${head} />` : html`<p class="muted">${t("workers.wait")}</p>`}</section>`;
}

const states = { ready: "ok", joining: "muted", draining: "warn", suspect: "warn", unhealthy: "bad", gone: "muted" };

function Now({ now, head }) {
  const [done, setDone] = useState("");
  const work = useWork();
  const call = (row, method) => work.start(async (signal) => {
    setDone("");
    const options = method === "POST" ? { method, body: {}, signal } : { method, signal };
    const got = await api(`workers/${row.id}/drain`, options);
    setDone(method === "POST" ? t("workers.done", { url: row.url, status: got.status, moved: got.moved }) : t("workers.back", { url: row.url }));
  });
  const drain = (row) => (row.state === "draining"
    ? html`<button type="button" class="small" onClick=${() => call(row, "DELETE")}>${t("workers.undrain")}</button>`
    : html`<${Ask} label=${t("workers.drain")} ask=${t("workers.drain.ask", { url: row.url })} onYes=${() => call(row, "POST")} disabled=${row.state === "joining"} />`);
  const figure = (key, label, format = count) => ({ key, label: t(label), num: true, sort: true, format });
  const columns = [
    { key: "url", label: t("workers.url"), text: true, sort: true, format: (url) => html`<code>${url}</code>` },
    { key: "model", label: t("workers.model"), text: true },
    { key: "worker_type", label: t("workers.type") },
    { key: "state", label: t("workers.state"), sort: true, format: (state, row) => html`<span class=${`state ${states[state] ?? ""}`} title=${row.problem}>${state}</span>` },
    { key: "breaker", label: t("workers.breaker") },
    figure("running", "workers.running"), figure("streams", "workers.streams"), figure("routed", "workers.routed"),
    figure("waiting_tokens", "workers.queued"), figure("kv_usage", "workers.kv", percent),
    figure("tokens_per_s", "workers.rate"), figure("cache_tokens", "workers.cache"), figure("since_s", "workers.since", seconds),
    { key: "id", label: t("workers.action"), format: (_, row) => drain(row) },
  ];
  const ready = now.workers.filter((one) => one.state === "ready").length;
  const told = { ready, all: now.workers.length, policy: now.policy, running: head?.running ?? 0, waiting: head?.waiting ?? 0, rate: count(head?.out_per_s) };
  const moved = Object.entries(now.moved).map(([result, number]) => `${result} ${number}`).join(", ");
  return html`<p class="summary">${t("workers.summary", told)}</p>
    <${DataTable} caption=${t("workers.table")} hideCaption=${true} columns=${columns} rows=${now.workers} rowKey=${(row) => row.id} empty=${t("workers.none")} />
    <p role="status" class="summary">${done}</p><${Failed} error=${work.error} />
    <p class="muted">${now.index_tokens === null ? t("workers.index.none") : t("workers.index", { tokens: count(now.index_tokens), bytes: bytes(now.index_bytes) })}
      ${" "}${moved ? t("workers.moved", { text: moved }) : t("workers.moved.none")}</p>
    <div class="sections"><${Choices} choices=${now.choices} /><${Tenants} tenants=${now.tenants} /></div>
    ${now.failed.length > 0 && html`<${DataTable} caption=${t("workers.failed")} rows=${now.failed}
      columns=${[{ key: "url", label: t("workers.url"), text: true }, { key: "why", label: t("workers.why"), text: true }]} />`}`;
}

function Choices({ choices }) {
  const total = choices.reduce((sum, one) => sum + one.count, 0) || 1;
  const columns = [
    { key: "policy", label: t("workers.policy") }, { key: "worker", label: t("workers.url"), text: true }, { key: "model", label: t("workers.model"), text: true },
    { key: "count", label: t("workers.count"), num: true, sort: true },
    { key: "share", label: t("workers.share"), num: true, format: (_, row) => percent(row.count / total) },
  ];
  return html`<div class="panel"><h2>${t("workers.choices")}</h2><${DataTable} caption=${t("workers.choices")} hideCaption=${true} columns=${columns} rows=${choices} /></div>`;
}

function Tenants({ tenants }) {
  const running = tenants.reduce((sum, one) => sum + one.running, 0) || 1;
  const columns = [
    { key: "name", label: t("workers.tenant"), text: true },
    { key: "running", label: t("workers.running"), num: true, sort: true }, { key: "waiting", label: t("workers.waiting"), num: true, sort: true },
    { key: "share", label: t("workers.share"), num: true, format: (_, row) => percent(row.running / running) },
    { key: "weight", label: t("workers.weight"), num: true }, { key: "deficit", label: t("workers.deficit"), num: true, format: count },
  ];
  return html`<div class="panel"><h2>${t("workers.tenants")}</h2><${DataTable} caption=${t("workers.tenants")} hideCaption=${true} columns=${columns} rows=${tenants} /></div>`;
}
