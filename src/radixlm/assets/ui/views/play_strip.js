// Tokens with their probabilities, the alternatives at one of them, and the line of entropy.

import { html, useRef } from "../vendor/preact.js";
import { percent } from "../lib/format.js";
import { entropy, visible } from "../lib/generate.js";
import { Twin } from "../lib/table.js";
import { t } from "../messages.js";

const LEVELS = [0.05, 0.2, 0.5, 0.8, 0.95];
const quoted = (text) => `“${visible(text)}”`;
const grouped = (value) => value.toLocaleString("en");

/** 0 (improbable) to 5. @param {number} p */
export const level = (p) => LEVELS.filter((bound) => p >= bound).length;

/** What the grammar left at a token, in words. */
function grammarWords(token, vocab) {
  if (token.forced) return t("play.token.forced");
  if (token.allowed === undefined) return "";
  return t("play.token.masked", { allowed: grouped(token.allowed), vocab: grouped(vocab) });
}

/**
 * The tokens as a row of buttons of which one is in the tab order.
 * @param {{tokens: any[], active: number, vocab: number, numbers?: boolean,
 *   marks?: (index: number) => string, label: string,
 *   onActive: (index: number, isPinned: boolean) => void, onEnter?: (index: number) => void}} props
 */
export function Strip({ tokens, active, vocab, numbers, marks, label, onActive, onEnter }) {
  const row = useRef(null);
  const last = tokens.length - 1;
  const move = (event) => {
    const at = Math.max(active, 0);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const index = Math.min(Math.max(next, 0), last);
    onActive(index, true);
    row.current.querySelectorAll("button")[index].focus();
  };
  return html`<div class=${`tok-strip ${numbers ? "numbers" : ""}`} role="group" aria-label=${label} ref=${row} onKeyDown=${move}>
    ${tokens.map((token, index) => {
      const more = grammarWords(token, vocab) + (token.chosen ? t("play.token.chosen") : "");
      const said = { n: index + 1, count: tokens.length, text: quoted(token.text), p: percent(token.p), more };
      const names = ["tok", `p${level(token.p)}`, token.forced && "forced", token.allowed !== undefined && "masked",
        token.chosen && "chosen", marks?.(index)].filter(Boolean).join(" ");
      return html`<button key=${index} type="button" class=${names} tabindex=${index === Math.max(active, 0) ? 0 : -1}
        aria-label=${t("play.token.label", said)} aria-current=${index === active ? "true" : null}
        onClick=${() => { onActive(index, true); onEnter?.(index); }}
        onFocus=${() => onActive(index, true)} onMouseEnter=${() => onActive(index, false)} data-p=${percent(token.p)}>${visible(token.text)}</button>
        ${token.text.includes("\n") && html`<span class="break"></span>`}`;
    })}
  </div>`;
}

/** Colours and patterns of the strip. @param {{grammar: boolean}} props */
export function StripLegend({ grammar }) {
  const bounds = ["< 5%", "5%", "20%", "50%", "80%", "≥ 95%"];
  return html`<p class="tok-legend"><span class="muted">${t("play.legend")}</span>
    ${bounds.map((text, index) => html`<span class=${`tok p${index}`}>${text}</span>`)}
    ${grammar && html`<span class="tok p5 forced">${t("play.token.forced").slice(2)}</span>`}</p>`;
}

/**
 * The alternatives at one token.
 * @param {{token: any, index: number, vocab: number, busy: boolean,
 *   onContinue: (index: number, candidate: any) => void}} props
 */
export function Alternatives({ token, index, vocab, busy, onContinue }) {
  const heading = html`<h2>${token ? t("play.panel.title", { n: index + 1, text: quoted(token.text) }) : t("play.panel")}</h2>`;
  if (!token) return html`<aside class="panel alternatives" aria-label=${t("play.panel")}>${heading}<p class="muted">${t("play.panel.hint")}</p></aside>`;
  const masked = token.allowed !== undefined && !token.forced;
  const counts = { allowed: grouped(token.allowed ?? 0), vocab: grouped(vocab), masked: grouped(vocab - (token.allowed ?? 0)) };
  return html`<aside class="panel alternatives" aria-label=${t("play.panel")}>${heading}
    <p>${t("play.panel.facts", { id: token.id, p: percent(token.p), bits: entropy(token).toFixed(2) })}</p>
    ${token.forced && html`<p class="forced-note">${t("play.panel.forced")}</p>`}
    ${masked && html`<p>${t("play.panel.masked", counts)}</p>`}
    ${token.chosen && html`<p>${t("play.panel.chosen")}</p>`}
    <table class="data"><caption class="visually-hidden">${t("play.candidates")}</caption>
      <thead><tr><th scope="col">${t("play.col.token")}</th><th scope="col" class="num">${t("play.col.id")}</th>
        <th scope="col">${t("play.col.p")}</th><th scope="col">${t("play.col.what")}</th></tr></thead>
      <tbody>${token.top.map((one) => html`<tr key=${one.id} aria-current=${one.id === token.id ? "true" : null}>
        <td><code>${visible(one.text)}</code></td><td class="num">${one.id}</td>
        <td class="share"><meter min="0" max="1" value=${one.p} aria-label=${quoted(one.text)}></meter> ${percent(one.p)}</td>
        <td><button type="button" class="small" disabled=${busy} aria-label=${t("play.continue", { text: quoted(one.text) })}
          onClick=${() => onContinue(index, one)}>${t("play.continue.short")}</button></td></tr>`)}
      </tbody></table>
    <p class="muted small">${t("play.panel.rank")}</p>
  </aside>`;
}

/** A line of the entropy of each token, with its table. @param {{tokens: any[], active: number}} props */
export function EntropyLine({ tokens, active }) {
  const bits = tokens.map(entropy);
  const max = Math.max(...bits, 0.01);
  const at = bits.indexOf(Math.max(...bits));
  const mean = bits.reduce((sum, one) => sum + one, 0) / bits.length;
  const x = (index) => ((index + 0.5) / bits.length) * 1000;
  const y = (value) => 58 - (value / max) * 54;
  const summary = t("play.entropy.summary", { mean: mean.toFixed(2), max: max.toFixed(2), at: at + 1 });
  const table = () => ({
    columns: [{ key: "n", label: t("play.col.n"), num: true }, { key: "text", label: t("play.col.token") },
      { key: "bits", label: t("play.col.bits"), num: true }],
    rows: tokens.map((token, index) => ({ n: index + 1, text: visible(token.text), bits: bits[index].toFixed(3) })),
  });
  return html`<${Twin} caption=${t("play.entropy")} summary=${`${summary} ${t("play.entropy.note")}`} table=${table}>
    <svg class="entropy" viewBox="0 0 1000 60" preserveAspectRatio="none" role="img" aria-label=${summary}>
      <polyline points=${bits.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" ")} />
      ${active >= 0 && active < bits.length && html`<line x1=${x(active)} x2=${x(active)} y1="0" y2="60" />`}
    </svg>
  </${Twin}>`;
}
