// From a conversation to a request of /v1/chat/completions, and from its events to messages.

import { api, ApiError, randomId, ROOT } from "../http.js";
import { above } from "./chat_model.js";

const ROUTE = "v1/chat/completions";

/** A setting that cannot be sent, named as the server would name it. */
function wrong(param, message) {
  return new ApiError(400, message, param);
}

function json(text, param) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw wrong(param, `${param} is not JSON: ${error.message}`);
  }
}

/** @param {import("./chat_model.js").Node} node */
function message(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call_id, content: node.text };
  if (node.role === "assistant") {
    const calls = node.calls?.map(({ id, name, arguments: args }) => ({
      id, type: "function", function: { name, arguments: args },
    }));
    return { role: "assistant", content: node.text || (calls?.length ? null : ""), ...(calls?.length && { tool_calls: calls }) };
  }
  if (!node.parts?.length) return { role: "user", content: node.text };
  const media = node.parts.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } }));
  return { role: "user", content: [...media, ...(node.text ? [{ type: "text", text: node.text }] : [])] };
}

/** Tools as a list of OpenAI's form; bare functions are wrapped. */
function tools(text) {
  const read = json(text, "tools");
  return (Array.isArray(read) ? read : [read]).map((tool) =>
    tool?.type ? tool : { type: "function", function: tool });
}

/**
 * The body that continues the conversation after message `last`.
 * @param {import("./chat_model.js").Conversation} talk @param {string} last
 */
export function bodyOf(talk, last) {
  const { system, sampling, format, schema, thinking, model } = talk.settings;
  const messages = above(talk, last).map(message);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  /** @type {Record<string, any>} */
  const body = { ...(model && { model }), messages, ...sampling };
  if (talk.settings.tools.trim()) {
    body.tools = tools(talk.settings.tools);
    body.tool_choice = talk.settings.tool_choice || "auto";
  }
  if (format === "json_object") body.response_format = { type: "json_object" };
  else if (format === "json_schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json(schema, "schema") } };
  } else if (format === "choice") {
    body.structured_outputs = { choice: schema.split("\n").filter((line) => line.trim()) };
  } else if (format !== "none") body[format] = schema;
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  return body;
}

/** Answers in the making: one abort controller for each message. */
export class Runs {
  /** @type {Map<string, AbortController>} */
  #running = new Map();
  #drawn = 0;
  /** What the server told of a prompt that it reads, by message. @type {Map<string, string>} */
  progress = new Map();

  /** @param {import("./chat_model.js").Chats} chats */
  constructor(chats) {
    this.chats = chats;
    chats.isBusy = () => this.#running.size > 0;
    chats.onForget = ({ nodes }) => Object.keys(nodes).forEach((id) => this.#running.get(id)?.abort());
  }

  isRunning = (id) => this.#running.has(id);

  get any() {
    return this.#running.size > 0;
  }

  stop() {
    for (const controller of this.#running.values()) controller.abort();
  }

  /** Answer after message `last`, in a new message below it. */
  async answer(talk, last) {
    /** @type {Record<string, any>} */
    const stats = { begun: performance.now(), seed: seedOf(talk), rid: `page-${randomId()}`, chunks: 0 };
    const node = this.chats.add(talk, last, { role: "assistant", stats: { seed: stats.seed, rid: stats.rid } });
    const controller = new AbortController();
    const choices = new Map([[0, node]]);
    this.#running.set(node.id, controller);
    try {
      const body = { ...bodyOf(talk, last), seed: stats.seed, rid: stats.rid };
      const asked = { stream: true, stream_options: { include_usage: true }, return_cached_tokens_details: true };
      const events = await api(ROUTE, {
        body: { ...body, ...asked }, stream: true, signal: controller.signal,
        // the name that the live view has; comments tell how far a long prompt is
        headers: { "X-Request-Id": stats.rid, "X-Prefill-Progress": "1" },
      });
      let isWhole = false;
      for await (const { event, data } of events) {
        if (event === "comment") {
          this.progress.set(node.id, /^prefill|^queued/.test(data) ? data : "");
          this.chats.changed();
        } else if (data === "[DONE]") isWhole = true;
        else if (data) this.#take(talk, last, choices, JSON.parse(data), stats);
      }
      if (!isWhole) throw new ApiError(0, "the stream ended early: the server may have stopped");
    } catch (error) {
      if (controller.signal.aborted) node.finish = "stopped";
      else if (error instanceof ApiError) node.error = { message: error.message, param: error.param, status: error.status };
      else node.error = { message: String(error), param: null, status: -1 };
    } finally {
      this.#running.delete(node.id);
      this.progress.delete(node.id);
      for (const one of choices.values()) one.stats = figures(one.stats, stats);
      this.chats.save(talk);
    }
    return node;
  }

  /** One chunk of the stream. */
  #take(talk, last, choices, chunk, stats) {
    if (chunk.error) {
      const { code, message, param } = chunk.error; // the status stands beside it
      throw new ApiError(Number(chunk.code) || Number(code) || 500, message ?? "error", param ?? null);
    }
    if (chunk.usage) stats.usage = chunk.usage;
    for (const { index, delta, finish_reason: finish } of chunk.choices ?? []) {
      let node = choices.get(index);
      if (!node) {
        // of n answers each is a branch
        node = this.chats.add(talk, last, { role: "assistant", stats: { ...choices.get(0).stats } });
        choices.set(index, node);
        talk.chosen[last] = choices.get(0).id;
      }
      const grown = (delta?.content ?? "") + (delta?.reasoning_content ?? "");
      if (grown || delta?.tool_calls) {
        stats.last = performance.now();
        stats.first ??= stats.last;
        stats.chunks++;
      }
      node.text += delta?.content ?? "";
      if (delta?.reasoning_content) node.thinking = (node.thinking ?? "") + delta.reasoning_content;
      for (const call of delta?.tool_calls ?? []) addCall(node, call);
      if (finish) node.finish = finish;
    }
    this.#draw(talk);
  }

  /** At most one drawing a frame; hidden tabs draw by the timer of ``save``. */
  #draw(talk) {
    if (this.#drawn) return;
    this.#drawn = requestAnimationFrame(() => {
      this.#drawn = 0;
      this.chats.save(talk, true);
    });
  }
}

/** @param {any} node @param {any} part of a call, as the stream brings it */
function addCall(node, { index = 0, id, function: called = {} }) {
  node.calls ??= [];
  node.calls[index] ??= { id: id ?? "", name: "", arguments: "" };
  const call = node.calls[index];
  if (id) call.id = id;
  call.name += called.name ?? "";
  call.arguments += called.arguments ?? "";
}

/** The seed that was set, else a drawn one: so each answer can be had again. */
function seedOf(talk) {
  const set = talk.settings.sampling.seed;
  return typeof set === "number" ? set : crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

/** Figures of an answer: tokens, and seconds as this browser saw them.
 * @param {any} before @param {any} seen */
function figures(before, seen) {
  const { begun, first, last, usage, chunks } = seen;
  const found = { ...before };
  if (usage) {
    found.prompt = usage.prompt_tokens;
    found.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    found.out = usage.completion_tokens;
  } else if (chunks) found.chunks = chunks;
  if (first) found.ttft_s = (first - begun) / 1000;
  // tokens that came at once say nothing of a rate
  if (usage && last - first > 20 && usage.completion_tokens > 1) {
    found.rate = ((usage.completion_tokens - 1) * 1000) / (last - first);
  }
  return found;
}

/** A request as a program. @param {object} body @param {"curl" | "python" | "openai"} kind @param {boolean} hasKey */
export function codeOf(body, kind, hasKey) {
  const url = new URL(ROUTE, ROOT).href;
  if (kind === "curl") {
    const key = hasKey ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
    const quoted = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
    return `curl ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
  }
  if (kind === "python") {
    const key = hasKey ? `, "Authorization": "Bearer " + os.environ["API_KEY"]` : "";
    return `import json\n${hasKey ? "import os\n" : ""}import urllib.request\n\nbody = ${python(body)}\n` +
      `request = urllib.request.Request(\n    "${url}",\n    json.dumps(body).encode(),\n` +
      `    {"Content-Type": "application/json"${key}},\n)\nwith urllib.request.urlopen(request) as answer:\n` +
      `    print(json.load(answer)["choices"][0]["message"]["content"])\n`;
  }
  const known = "model messages temperature top_p max_tokens max_completion_tokens n seed stop frequency_penalty presence_penalty tools tool_choice response_format logit_bias reasoning_effort".split(" ");
  const own = Object.entries({ model: "default", ...body }).filter(([name]) => known.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.includes(name)));
  const args = own.map(([name, value]) => `    ${name}=${python(value, 1)},\n`).join("");
  const more = Object.keys(extra).length ? `    extra_body=${python(extra, 1)},\n` : "";
  const key = hasKey ? `os.environ["API_KEY"]` : `"none"`;
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url="${new URL("v1", ROOT).href}", api_key=${key})\n` +
    `answer = client.chat.completions.create(\n${args}${more})\nprint(answer.choices[0].message.content)\n`;
}

/** A value as a Python literal. */
export function python(value, depth = 0) {
  const pad = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList
    ? value.map((item) => pad + python(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${pad}${JSON.stringify(name)}: ${python(item, depth + 1)}`);
  const [opening, closing] = isList ? "[]" : "{}";
  return items.length ? `${opening}\n${items.join(",\n")},\n${end}${closing}` : opening + closing;
}
