// One prompt and one seed, two settings: where the answers part.

import { html, useState } from "../vendor/preact.js";
import { Failed, NumberField, numbers, useFields, useWork } from "../lib/form.js";
import { generate, promptIds } from "../lib/generate.js";
import { t } from "../messages.js";
import { Prompt, PROMPT, promptOf } from "./play_form.js";
import { Strip } from "./play_strip.js";

const SETTING = { temperature: "1", top_p: "1", top_k: "", min_p: "", repetition_penalty: "" };
const LABELS = { temperature: "play.temperature", top_p: "play.top_p", top_k: "play.top_k", min_p: "play.min_p",
  repetition_penalty: "play.repetition" };

/**
 * Which tokens are common, in order (the longest common subsequence).
 * @param {number[]} a @param {number[]} b @returns {[Set<number>, Set<number>]} indices in each
 */
export function common(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1
        : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const [inA, inB] = [new Set(), new Set()];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) {
      inA.add(i++);
      inB.add(j++);
    } else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return [inA, inB];
}

function Setting({ name, bind }) {
  return html`<fieldset class="panel"><legend>${t("play.setting", { name })}</legend><div class="fields">
    ${Object.keys(SETTING).map((one) => html`<${NumberField} key=${one} label=${t(LABELS[one])} bind=${bind(one)} step="any" />`)}
  </div></fieldset>`;
}

export default function Diff() {
  const [prompt, bindPrompt] = useFields(PROMPT);
  const [shared, bindShared] = useFields({ max: "48", seed: "1" });
  const [a, bindA] = useFields({ ...SETTING, temperature: "0.7" });
  const [b, bindB] = useFields({ ...SETTING, temperature: "1.2" });
  const [got, setGot] = useState(null);
  const work = useWork();
  const submit = (event) => {
    event.preventDefault();
    work.start(async (signal) => {
      const ids = await promptIds(promptOf(prompt), signal);
      const both = numbers({ max_new_tokens: shared.max, sampling_seed: shared.seed });
      const one = (values) => generate({ ids, sampling: { ...both, ...numbers(values) }, top: 1, signal });
      setGot(await Promise.all([one(a), one(b)]));
    });
  };
  return html`<p class="muted">${t("play.compare.about")}</p>
    <form class="ask wide" onSubmit=${submit}>
      <${Prompt} values=${prompt} bind=${bindPrompt} />
      <div class="fields"><${NumberField} label=${t("play.max")} bind=${bindShared("max")} min="1" max="1024" />
        <${NumberField} label=${t("play.seed")} bind=${bindShared("seed")} /></div>
      <${Setting} name="A" bind=${bindA} /><${Setting} name="B" bind=${bindB} />
      <div class="row"><button class="primary" disabled=${work.busy}>${t("play.compare")}</button>
        ${work.busy && html`<button type="button" onClick=${work.stop}>${t("play.stop")}</button>`}</div>
    </form>
    <${Failed} error=${work.error} />
    ${got && html`<${Parted} answers=${got} />`}`;
}

function Parted({ answers }) {
  const [active, setActive] = useState([-1, -1]);
  const ids = answers.map((one) => one.tokens.map((token) => token.id));
  const kept = common(...ids);
  let equal = 0;
  while (equal < ids[0].length && ids[0][equal] === ids[1][equal]) equal += 1;
  const only = kept.map((set, side) => ids[side].length - set.size);
  const isSame = !only[0] && !only[1];
  const summary = isSame ? t("play.same", { count: equal }) : t("play.parted", { count: equal, a: only[0], b: only[1] });
  return html`<section class="output"><p class="summary" role="status">${summary}</p>
    <div class="split even">${answers.map((one, side) => html`<div key=${side}>
      <h2>${t("play.answer", { name: "AB"[side] })}</h2>
      <${Strip} tokens=${one.tokens} active=${active[side]} vocab=${0} label=${t("play.answer", { name: "AB"[side] })}
        marks=${(index) => (kept[side].has(index) ? "" : "only")}
        onActive=${(index) => setActive((before) => before.map((old, at) => (at === side ? index : old)))} /></div>`)}
    </div></section>`;
}
