// One message: its text, thinking, tool calls, media, figures and actions.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { keys } from "../http.js";
import { copy, CopyButton, Markdown } from "../lib/markdown.js";
import { t } from "../messages.js";
import { children } from "./chat_model.js";
import { bodyOf, codeOf } from "./chat_run.js";

const CODES = ["curl", "python", "openai"];
const CODE_NAMES = { curl: "curl", python: "Python", openai: "OpenAI SDK" };

/**
 * @param {{talk: import("./chat_model.js").Conversation, node: import("./chat_model.js").Node,
 *   chats: any, runs: any, actions: any, isLast: boolean, isCompared?: boolean}} props
 */
export function Message({ talk, node, chats, runs, actions, isLast, isCompared = false }) {
  const [isEdited, setEdited] = useState(false);
  const isRunning = runs.isRunning(node.id);
  const name = node.role === "user" ? t("chat.you") : node.role === "tool"
    ? t("chat.tool", { name: callName(talk, node) }) : t("chat.model");
  return html`<article class=${`message ${node.role}`} aria-label=${name} aria-busy=${isRunning ? "true" : null}>
    <div class="who">${name}</div>
    <div class="body">
      ${node.parts?.length > 0 && html`<${Media} parts=${node.parts} />`}
      ${node.thinking && html`<details class="thinking" open=${isRunning && !node.text}>
        <summary>${t("chat.thinking")}</summary><${Markdown} text=${node.thinking} live=${isRunning} /></details>`}
      ${isEdited
        ? html`<${Editor} node=${node} onCancel=${() => setEdited(false)} onDone=${(text) => {
            setEdited(false);
            actions.edit(node, text);
          }} />`
        : node.role === "assistant"
          ? html`<${Markdown} text=${node.text} live=${isRunning} />`
          : html`<div class="said" dir="auto">${node.text}</div>`}
      ${isRunning && !node.text && !node.thinking && !node.calls && html`<${Waiting} progress=${runs.progress.get(node.id)} />`}
      ${node.calls?.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
      ${node.error && html`<${Failure} error=${node.error} onRetry=${() => actions.regenerate(node)} />`}
      ${isLast && node.calls?.length > 0 && !isRunning && !node.error && !isCompared && html`<${Results} node=${node} actions=${actions} />`}
      ${node.role === "assistant" && !isRunning && html`<${Figures} node=${node} />`}
      ${!isRunning && !isEdited && html`<${Actions} talk=${talk} node=${node} chats=${chats} runs=${runs}
        actions=${actions} isCompared=${isCompared} onEdit=${() => setEdited(true)} />`}
    </div>
  </article>`;
}

function callName(talk, node) {
  for (const one of Object.values(talk.nodes)) {
    const call = one.calls?.find(({ id }) => id === node.call_id);
    if (call) return call.name;
  }
  return "";
}

function Waiting({ progress }) {
  const [begun] = useState(performance.now());
  const [now, setNow] = useState(begun);
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), 500);
    return () => clearInterval(timer);
  }, []);
  return html`<p class="muted waiting">${t("chat.waiting", { s: ((now - begun) / 1000).toFixed(1) })}${progress && ` · ${progress}`}</p>`;
}

/** @param {{parts: import("./chat_model.js").Part[], onRemove?: (i: number) => void}} props */
export function Media({ parts, onRemove }) {
  return html`<div class="media">${parts.map((part, i) => html`<figure key=${i}>
    ${part.kind === "image" ? html`<img src=${part.url} alt=${part.name} />`
      : part.kind === "video" ? html`<video src=${part.url} controls aria-label=${part.name}></video>`
        : html`<audio src=${part.url} controls aria-label=${part.name}></audio>`}
    <figcaption>${part.name}${onRemove && html`<button class="quiet icon small" type="button"
      aria-label=${t("chat.remove_part", { name: part.name })} onClick=${() => onRemove(i)}>✕</button>`}</figcaption>
  </figure>`)}</div>`;
}

function Editor({ node, onCancel, onDone }) {
  const [text, setText] = useState(node.text);
  const area = useRef(null);
  useEffect(() => area.current.focus(), []);
  const press = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      onDone(text);
    }
  };
  return html`<div class="editor">
    <textarea ref=${area} rows="3" aria-label=${t("chat.edit")} value=${text}
      onInput=${(e) => setText(e.currentTarget.value)} onKeyDown=${press}></textarea>
    <div class="row end"><button class="small" onClick=${onCancel}>${t("chat.cancel")}</button>
      <button class="small primary" onClick=${() => onDone(text)}>${t("chat.send_edit")}</button></div>
  </div>`;
}

function Call({ call }) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch { /* it still grows, or is no JSON */ }
  return html`<div class="call"><div class="code-head"><span>${t("chat.call", { name: call.name })}</span>
    <${CopyButton} text=${shown} /></div><pre tabindex="0"><code>${shown}</code></pre></div>`;
}

/** The editor for what the tools answer. */
function Results({ node, actions }) {
  const [texts, setTexts] = useState(node.calls.map(() => ""));
  const change = (i) => (event) => setTexts(texts.with(i, event.currentTarget.value));
  const submit = (event) => {
    event.preventDefault();
    actions.results(node, texts);
  };
  return html`<form class="results" onSubmit=${submit}>
    ${node.calls.map((call, i) => html`<label key=${call.id}>${t("chat.result", { name: call.name })}
      <textarea class="mono" rows="2" required placeholder=${t("chat.result_hint")} value=${texts[i]} onInput=${change(i)}></textarea>
    </label>`)}
    <div class="row end"><button class="small primary">${t("chat.send_results")}</button></div>
  </form>`;
}

function Failure({ error, onRetry }) {
  const head = error.status > 0 ? t("chat.error", { status: error.status }) : t("chat.no_answer");
  return html`<div class="failure" role="alert"><strong>${head}</strong>
    <span class="what">${error.message}</span>
    ${error.param && html`<code>${t("chat.field", { param: error.param })}</code>`}
    <button class="small" onClick=${onRetry}>${t("chat.retry")}</button></div>`;
}

function Figures({ node }) {
  const { prompt, cached, out, chunks, ttft_s: ttft, rate, seed, rid } = node.stats ?? {};
  const shown = [
    prompt !== undefined && t("chat.stat.prompt", { n: prompt }),
    cached !== undefined && t("chat.stat.cached", { n: cached }),
    out !== undefined ? t("chat.stat.out", { n: out }) : chunks && t("chat.stat.chunks", { n: chunks }),
    ttft !== undefined && t("chat.stat.ttft", { s: ttft < 1 ? ttft.toFixed(3) : ttft.toFixed(1) }),
    rate && t("chat.stat.rate", { n: rate < 10 ? rate.toFixed(1) : Math.round(rate) }),
    seed !== undefined && t("chat.stat.seed", { n: seed }),
    node.finish === "stopped" && t("chat.stopped"),
    node.finish === "length" && t("chat.cut"),
  ].filter(Boolean);
  if (!shown.length && !rid) return null;
  return html`<div class="figures">${shown.map((text, i) => html`<span key=${i}>${text}</span>`)}
    ${rid && html`<a href=${`#/live/${encodeURIComponent(rid)}`} title=${rid}>${t("chat.stat.rid")}</a>`}</div>`;
}

function Actions({ talk, node, chats, actions, isCompared, onEdit }) {
  const siblings = children(talk, node.parent);
  const at = siblings.indexOf(node);
  const label = t("chat.branch", { i: at + 1, n: siblings.length });
  const code = (event) => {
    const kind = event.currentTarget.value;
    event.currentTarget.value = "";
    try {
      copy(codeOf(bodyOf(talk, node.role === "assistant" ? node.parent : node.id), kind, Boolean(keys.get())));
    } catch (error) {
      actions.tell(error.message);
    }
  };
  return html`<div class="actions">
    ${siblings.length > 1 && !isCompared && html`<span class="branches" role="group" aria-label=${label}>
      <button class="quiet icon small" disabled=${at === 0} aria-label=${t("chat.earlier")} onClick=${() => chats.turn(talk, node, -1)}>‹</button>
      <span class="count">${at + 1}/${siblings.length}</span>
      <button class="quiet icon small" disabled=${at === siblings.length - 1} aria-label=${t("chat.later")} onClick=${() => chats.turn(talk, node, 1)}>›</button>
    </span><button class="quiet small" onClick=${() => actions.compare(node)}>${t("chat.compare")}</button>`}
    <${CopyButton} text=${node.text} />
    ${!isCompared && html`
      ${node.role === "assistant"
        ? html`<button class="quiet small" onClick=${() => actions.regenerate(node)}>${t("chat.regenerate")}</button>`
        : html`<button class="quiet small" onClick=${onEdit}>${t("chat.edit")}</button>`}
      <select class="quiet small" aria-label=${t("chat.copy_as")} value="" onChange=${code}>
        <option value="">${t("chat.copy_as")}</option>
        ${CODES.map((kind) => html`<option key=${kind} value=${kind}>${CODE_NAMES[kind]}</option>`)}
      </select>
      <button class="quiet small" onClick=${() => actions.remove(node)}>${t("chat.remove")}</button>`}
  </div>`;
}
