// Token by token: probabilities, "what if", grammars.

import { html, useRef, useState } from "../vendor/preact.js";
import { Failed, numbers, useFields, useWork } from "../lib/form.js";
import { generate, promptIds, traceGrammar, visible } from "../lib/generate.js";
import { t } from "../messages.js";
import { GrammarField, Prompt, PROMPT, promptOf, Sampling } from "./play_form.js";
import { Alternatives, EntropyLine, Strip, StripLegend } from "./play_strip.js";

const SAMPLING = { max: "32", temperature: "1", top_p: "1", seed: "", top: "5" };

/**
 * @typedef {{ids: number[], sampling: object, grammar: any, top: number, tokens: any[], finish: any,
 *   vocab: number, label: string}} Run  one answer, with all that is needed to continue it
 */

/** What the form asks for. */
function asked(values, grammar) {
  const { max, temperature, top_p, seed } = values;
  const sampling = numbers({ max_new_tokens: max, temperature, top_p, sampling_seed: seed });
  return { sampling, grammar: grammar.kind ? { ...grammar } : null, top: Number(values.top) || 5 };
}

/** Generate after `kept`, and ask the grammar about the whole output. @returns {Promise<Run>} */
async function answer(question, ids, kept, label, signal) {
  const got = await generate({ ...question, ids, prefix: kept.map((one) => one.id), signal });
  const run = { ...question, ids, tokens: [...kept, ...got.tokens], finish: got.finish, vocab: 0, label };
  if (!question.grammar) return run;
  return { ...run, ...(await traceGrammar(question.grammar, run.tokens, signal)) };
}

export default function Tokens() {
  const [prompt, bindPrompt] = useFields(PROMPT);
  const [values, bind] = useFields(SAMPLING);
  const [grammar, bindGrammar, setGrammar] = useFields({ kind: "", value: "" });
  const [runs, setRuns] = useState([]);
  const [shown, setShown] = useState(0);
  const work = useWork();
  const submit = (event) => {
    event.preventDefault();
    work.start(async (signal) => {
      const ids = await promptIds(promptOf(prompt), signal);
      setRuns([await answer(asked(values, grammar), ids, [], t("play.branch.first"), signal)]);
      setShown(0);
    });
  };
  const branch = (run, index, candidate) => work.start(async (signal) => {
    const kept = [...run.tokens.slice(0, index), { ...candidate, top: run.tokens[index].top, chosen: true }];
    const label = t("play.branch", { text: `“${visible(candidate.text)}”`, n: index + 1 });
    const made = await answer(run, run.ids, kept, label, signal);
    setRuns((before) => [...before, made]);
    setShown(runs.length);
  });
  return html`<p class="muted">${t("play.about")}</p>
    <form class="ask wide" onSubmit=${submit}>
      <${Prompt} values=${prompt} bind=${bindPrompt} />
      <div><${Sampling} bind=${bind} /><${GrammarField} values=${grammar} bind=${bindGrammar} set=${setGrammar} /></div>
      <div class="row">
        <button class="primary" disabled=${work.busy}>${t("play.run")}</button>
        ${work.busy && html`<button type="button" onClick=${work.stop}>${t("play.stop")}</button>`}
        <span role="status" class="muted">${work.busy ? t("play.running") : ""}</span>
      </div>
    </form>
    <${Failed} error=${work.error} />
    ${runs.length
      ? html`<${Output} key=${shown} runs=${runs} shown=${shown} busy=${work.busy} onShow=${setShown} onBranch=${branch} />`
      : html`<p class="muted empty">${t("play.empty")}</p>`}`;
}

function Output({ runs, shown, busy, onShow, onBranch }) {
  const run = runs[shown];
  const [active, setActive] = useState(run.tokens.findLastIndex((one) => one.chosen));
  const [isPinned, setPinned] = useState(false);
  const [hasNumbers, setNumbers] = useState(false);
  const box = useRef(null);
  const point = (index, pins) => {
    if (!pins && isPinned) return;
    setActive(index);
    if (pins) setPinned(true);
  };
  const enter = () => requestAnimationFrame(() => box.current?.querySelector(".alternatives td button")?.focus());
  const back = (event) => {
    if (event.key !== "Escape" || active < 0) return;
    setPinned(false);
    box.current.querySelectorAll(".tok-strip button")[active].focus();
  };
  const finish = run.finish?.type ?? "–";
  const forced = run.tokens.filter((one) => one.forced).length;
  const logs = run.tokens.reduce((sum, one) => sum + Math.log(Math.max(one.p, 1e-30)), 0);
  return html`<section class="output" aria-labelledby="play-output">
    <h2 id="play-output">${t("play.result")}</h2>
    ${runs.length > 1 && html`<div class="row branches" role="group" aria-label=${t("play.branches")}>${runs.map((one, index) => html`
      <button key=${index} type="button" class="small" aria-pressed=${index === shown ? "true" : "false"} onClick=${() => onShow(index)}>${one.label}</button>`)}</div>`}
    <div class="split" ref=${box} onKeyDown=${back}>
      <div>
        <${Strip} tokens=${run.tokens} active=${active} vocab=${run.vocab} numbers=${hasNumbers} label=${t("play.strip")}
          onActive=${point} onEnter=${enter} />
        <div class="row"><${StripLegend} grammar=${!!run.grammar} /><span class="grow"></span>
          <label class="check-label"><input type="checkbox" checked=${hasNumbers} onChange=${(event) => setNumbers(event.currentTarget.checked)} /> ${t("play.numbers")}</label></div>
        <p class="summary" role="status">${t("play.finish", { count: run.tokens.length, why: finish })}
          ${` ${t("play.perplexity", { value: Math.exp(-logs / Math.max(run.tokens.length, 1)).toFixed(2) })}`}
          ${run.grammar && ` ${t("play.forced.count", { forced })}`}</p>
        ${run.tokens.length > 0 && html`<${EntropyLine} tokens=${run.tokens} active=${active} />`}
      </div>
      <${Alternatives} token=${run.tokens[active]} index=${active} vocab=${run.vocab} busy=${busy} onContinue=${(index, one) => onBranch(run, index, one)} />
    </div>
  </section>`;
}
