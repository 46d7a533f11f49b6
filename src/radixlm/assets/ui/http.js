// Calls of the API: JSON in and out, server-sent events as an async iterator.

/** The server's root: the page lies at <root>/ui/, so addresses hold behind any proxy. */
export const ROOT = new URL("../", location.href.split("#")[0]);
const KEY = "radixlm.key";

/** What the server refused, in its own words. */
export class ApiError extends Error {
  /** @param {number} status 0: no answer @param {string} message @param {string | null} param */
  constructor(status, message, param = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.param = param;
  }
}

export const keys = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} key */
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
  /** Ask for a key: set by the shell. @type {(why: string) => Promise<boolean>} */
  ask: async () => false,
};

/** Random hexadecimal digits; randomUUID is there in secure contexts only. */
export function randomId(bytes = 8) {
  const drawn = crypto.getRandomValues(new Uint8Array(bytes));
  return Array.from(drawn, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Call a route. With `stream` the answer is an async iterator of `{event, data}`; else parsed JSON,
 * or text where it is none. Throws ApiError. A 401 asks for the key, once.
 * @param {string} path @param {{method?: string, body?: any, signal?: AbortSignal,
 *   stream?: boolean, headers?: Record<string, string>, quiet?: boolean}} [options]
 * @returns {Promise<any>}
 */
export async function api(path, options = {}) {
  const key = keys.get();
  let response = await send(path, options);
  if (response.status === 401 && !options.quiet) {
    const refused = await failure(response.clone());
    if (keys.get() !== key || (await askedOnce(refused.message))) response = await send(path, options);
  }
  if (!response.ok) throw await failure(response);
  if (options.stream) return events(response, options.signal);
  const text = await response.text();
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @type {Promise<boolean> | null} */
let asking = null;

/** Calls that are refused at the same time share one dialog. @param {string} why */
function askedOnce(why) {
  asking ??= keys.ask(why).finally(() => (asking = null));
  return asking;
}

/** @param {string} path @param {any} options */
async function send(path, { method, body, signal, headers = {} }) {
  /** @type {Record<string, string>} */
  const sent = { ...headers };
  const key = keys.get();
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path.replace(/^\//, ""), ROOT), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "the server does not answer");
  }
}

/** @param {Response} response */
async function failure(response) {
  const text = await response.text();
  try {
    const parsed = JSON.parse(text);
    const error = typeof parsed.error === "object" && parsed.error ? parsed.error : parsed;
    const message = error.message ?? parsed.detail ?? parsed.error ?? text;
    return new ApiError(response.status, String(message), error.param ?? null);
  } catch {
    return new ApiError(response.status, text.trim().slice(0, 2000) || response.statusText);
  }
}

/** The events of a stream. @param {Response} response @param {AbortSignal} [signal] */
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new ApiError(0, "the connection to the server was lost");
      }
      if (part.done) return;
      const blocks = (held + part.value).split(/\r?\n\r?\n/);
      held = blocks.pop() ?? "";
      for (const block of blocks) {
        yield parse(block);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Comments (heartbeats, progress) are events named "comment".
 * @param {string} block @returns {{event: string, data: string, id: string}} */
function parse(block) {
  const event = { event: "message", data: "", id: "" };
  const data = [];
  let comment = "";
  let isEvent = false;
  for (const line of block.split(/\r?\n/)) {
    const at = line.indexOf(":");
    if (at === 0) comment = line.slice(1).trim();
    if (at === 0 || !line) continue;
    isEvent = true;
    const name = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name === "event" || name === "id") event[name] = value;
  }
  event.data = data.join("\n");
  return isEvent ? event : { event: "comment", data: comment, id: "" };
}
