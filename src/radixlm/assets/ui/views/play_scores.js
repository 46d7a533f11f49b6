// Scores of labels, and embeddings; said plainly where the model has none.

import { html, useState } from "../vendor/preact.js";
import { api } from "../http.js";
import { Failed, Field, useFields, useWork } from "../lib/form.js";
import { percent } from "../lib/format.js";
import { DataTable } from "../lib/table.js";
import { t } from "../messages.js";

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

export default function Scores({ store }) {
  return html`<${Score} /><${Embeddings} store=${store} />`;
}

/** The id of each label, with a space before it or without; an error for one of several tokens. */
async function labelIds(labels, signal) {
  const prompt = [...labels.map((label) => ` ${label}`), ...labels];
  const { tokens } = await api("tokenize", { body: { prompt, add_special_tokens: false }, signal });
  return labels.map((label, index) => {
    const ids = [tokens[index], tokens[index + labels.length]].find((one) => one.length === 1);
    if (!ids) throw new Error(t("play.score.long", { label: `“${label}”`, count: tokens[index].length }));
    return ids[0];
  });
}

function Score() {
  const [values, bind] = useFields({ query: "Is this a colour? Answer yes or no.", items: "Red\nHorse", labels: "yes, no" });
  const [got, setGot] = useState(null);
  const work = useWork();
  const submit = (event) => {
    event.preventDefault();
    work.start(async (signal) => {
      const labels = values.labels.split(",").map((one) => one.trim()).filter(Boolean);
      const items = lines(values.items);
      const label_token_ids = await labelIds(labels, signal);
      const body = { query: values.query, items: items.map((one) => ` ${one}`), label_token_ids, apply_softmax: true };
      setGot({ labels, items, scores: (await api("v1/score", { body, signal })).scores });
    });
  };
  const table = got && {
    columns: [t("play.col.item"), ...got.labels].map((label, index) => ({ key: String(index), label, num: index > 0 })),
    rows: got.items.map((item, index) => [item, ...got.scores[index].map(percent)]),
  };
  return html`<section aria-labelledby="score-title"><h2 id="score-title">${t("play.score.title")}</h2>
    <p class="muted">${t("play.score.about")}</p>
    <form class="ask" onSubmit=${submit}>
      <${Field} label=${t("play.score.query")}><textarea rows="2" ...${bind("query")}></textarea></${Field}>
      <${Field} label=${t("play.score.items")}><textarea rows="3" ...${bind("items")}></textarea></${Field}>
      <${Field} label=${t("play.score.labels")}><input ...${bind("labels")} /></${Field}>
      <div class="row"><button class="primary" disabled=${work.busy}>${t("play.score.run")}</button></div>
    </form>
    <${Failed} error=${work.error} />
    ${table && html`<${DataTable} caption=${t("play.score.table")} ...${table} />`}</section>`;
}

const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);

/** @param {number[]} a @param {number[]} b */
export const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b) || 1);

function Embeddings() {
  const [values, bind] = useFields({ texts: "A cat sleeps.\nA kitten naps.\nStocks fell." });
  const [got, setGot] = useState(null);
  const work = useWork();
  const submit = (event) => {
    event.preventDefault();
    setGot(null);
    work.start(async (signal) => {
      const texts = lines(values.texts);
      const { is_generation: generates } = await api("model_info", { signal });
      if (generates) return setGot({ none: true });
      const { data } = await api("v1/embeddings", { body: { input: texts }, signal });
      return setGot({ texts, vectors: data.map((one) => one.embedding) });
    });
  };
  return html`<section aria-labelledby="embed-title"><h2 id="embed-title">${t("play.embed.title")}</h2>
    <form class="ask" onSubmit=${submit}>
      <${Field} label=${t("play.embed.texts")}><textarea rows="3" ...${bind("texts")}></textarea></${Field}>
      <div class="row"><button class="primary" disabled=${work.busy}>${t("play.embed.run")}</button></div>
    </form>
    <${Failed} error=${work.error} />
    <div role="status">${got?.none && html`<p class="told">${t("play.embed.none")}</p>`}</div>
    ${got?.vectors && html`<${Similarities} ...${got} />`}</section>`;
}

function Similarities({ texts, vectors }) {
  const columns = [{ key: "text", label: t("play.col.text") },
    ...texts.map((_, index) => ({ key: String(index), label: String(index + 1), num: true })),
    { key: "first", label: t("play.embed.first") }];
  const rows = texts.map((text, index) => [`${index + 1}. ${text}`,
    ...vectors.map((other) => cosine(vectors[index], other).toFixed(3)),
    vectors[index].slice(0, 4).map((value) => value.toFixed(4)).join(", ")]);
  return html`<p class="summary">${t("play.embed.summary", { count: vectors.length, dim: vectors[0].length })}</p>
    <${DataTable} caption=${t("play.embed.table")} columns=${columns} rows=${rows} />`;
}
