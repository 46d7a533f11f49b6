// Generations for the playground: tokens with their probabilities, and what a grammar allowed.

import { api } from "../http.js";

/**
 * @typedef {{id: number, text: string, p: number}} Candidate
 * @typedef {Candidate & {top: Candidate[], allowed?: number, forced?: boolean, chosen?: boolean}} Token
 * @typedef {{kind: string, value: string}} Grammar  kind: "" for none
 */

const candidate = ([logprob, id, text]) => ({ id, text: text ?? "", p: Math.exp(logprob ?? -Infinity) });

/** Token ids of a text or of the rendered messages. @param {{prompt?: string, messages?: any[]}} body */
export async function promptIds(body, signal) {
  const got = await api("tokenize", { body, signal });
  return got.tokens;
}

/**
 * Continue `ids`, of which the last `prefix.length` are output.
 * @param {{ids: number[], prefix?: number[], sampling: object, grammar?: Grammar, top?: number,
 *   signal?: AbortSignal}} asked
 * @returns {Promise<{tokens: Token[], finish: any, text: string}>}
 */
export async function generate({ ids, prefix = [], sampling, grammar, top = 5, signal }) {
  const body = {
    input_ids: [...ids, ...prefix],
    sampling_params: { ...sampling, skip_special_tokens: false, no_stop_trim: true, ...constraint(grammar) },
    return_logprob: true,
    top_logprobs_num: top,
    return_text_in_logprobs: true,
  };
  if (prefix.length) body.resume = { num_emitted: prefix.length };
  const got = await api("generate", { body, signal });
  const meta = got.meta_info;
  const tops = meta.output_top_logprobs ?? [];
  const tokens = (meta.output_token_logprobs ?? []).map((one, index) => ({
    ...candidate(one),
    top: (tops[index] ?? []).map(candidate),
  }));
  return { tokens, finish: meta.finish_reason, text: got.text };
}

/** @param {Grammar} [grammar] */
function constraint(grammar) {
  if (!grammar?.kind || !grammar.value.trim()) return {};
  return { [grammar.kind === "lark" ? "ebnf" : grammar.kind]: grammar.value };
}

/** Whether a grammar can be used. @param {Grammar} grammar */
export const checkGrammar = ({ kind, value }, signal) =>
  api("grammar/check", { body: { type: kind, value }, signal });

/**
 * Add to each token how many the grammar allowed there, and whether it was forced.
 * @param {Grammar} grammar @param {Token[]} tokens
 * @returns {Promise<{tokens: Token[], vocab: number}>}
 */
export async function traceGrammar({ kind, value }, tokens, signal) {
  const token_ids = tokens.map((one) => one.id);
  const got = await api("grammar/trace", { body: { type: kind, value, token_ids }, signal });
  const told = tokens.map((one, index) => ({ ...one, allowed: got.allowed[index], forced: got.forced[index] }));
  return { tokens: told, vocab: got.vocab_size };
}

/**
 * Entropy in bits over the candidates that are known; the rest counts as one more.
 * @param {Token} token
 */
export function entropy(token) {
  const shares = token.top.map((one) => one.p);
  const rest = 1 - shares.reduce((sum, p) => sum + p, 0);
  if (rest > 1e-6) shares.push(rest);
  return shares.reduce((sum, p) => (p > 0 ? sum - p * Math.log2(p) : sum), 0);
}

/** A token as one can see it. @param {string} text */
export const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍"));
