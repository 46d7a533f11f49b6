// Conversations as trees of messages, kept in IndexedDB of this browser only.

import { randomId } from "../http.js";

const DATABASE = "radixlm";
const TABLES = ["conversations", "prompts", "state"];
const SAVE_MS = 1500;
export const FORMAT = "radixlm-conversations";

/**
 * @typedef {{kind: "image" | "video" | "audio", name: string, url: string}} Part
 * @typedef {{id: string, name: string, arguments: string}} ToolCall
 * @typedef {{id: string, parent: string, role: "user" | "assistant" | "tool", order: number,
 *   text: string, parts?: Part[], thinking?: string, calls?: ToolCall[], call_id?: string,
 *   stats?: Record<string, any>, finish?: string | null, error?: {message: string, param: string | null, status: number}}} Node
 * @typedef {{system: string, sampling: Record<string, any>, tools: string, tool_choice: string,
 *   format: string, schema: string, thinking: string, model: string}} Settings
 * @typedef {{id: string, title: string, created: number, updated: number, settings: Settings,
 *   nodes: Record<string, Node>, chosen: Record<string, string>}} Conversation
 */

/** The parent of first messages. */
export const ROOT_ID = "root";
/** @returns {Settings} */
export const noSettings = () => ({
  system: "", sampling: {}, tools: "", tool_choice: "auto", format: "none", schema: "", thinking: "", model: "",
});

/** @returns {Promise<IDBDatabase>} */
function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => {
      for (const name of TABLES) asked.result.createObjectStore(name, { keyPath: "id" });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

let database = null;

/** One operation on a table. @param {string} table @param {string} method @param {any[]} args */
async function kept(table, method, ...args) {
  database ??= open();
  const opened = await database;
  return new Promise((resolve, reject) => {
    const mode = method.startsWith("get") ? "readonly" : "readwrite";
    const asked = opened.transaction(table, mode).objectStore(table)[method](...args);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** The children of a message, oldest first. @param {Conversation} talk @param {string} id */
export function children(talk, id) {
  return Object.values(talk.nodes).filter((n) => n.parent === id).sort((a, b) => a.order - b.order);
}

/** The messages from `from` on, by the branches that were chosen last; `chosen` overrides them. */
export function path(talk, from = ROOT_ID, chosen = talk.chosen) {
  const found = [];
  for (let id = from; ;) {
    const options = children(talk, id);
    if (!options.length) return found;
    const next = options.find((n) => n.id === chosen[id]) ?? options.at(-1);
    found.push(next);
    id = next.id;
  }
}

/** The messages above `id`, itself included, oldest first. */
export function above(talk, id) {
  const found = [];
  for (let node = talk.nodes[id]; node; node = talk.nodes[node.parent]) found.unshift(node);
  return found;
}

/** All that the chat view shows, without a document: the view draws what it says. */
export class Chats {
  /** @type {Conversation[]} newest first */
  list = [];
  /** @type {Conversation | null} */
  talk = null;
  /** @type {{id: string, text: string}[]} system prompts by name */
  prompts = [];
  /** Why nothing is kept, where the browser allows no database. */
  storageError = "";
  /** @type {Set<() => void>} */
  #watchers = new Set();
  #timer = 0;
  #tabs = "BroadcastChannel" in globalThis ? new BroadcastChannel("radixlm.chats") : null;
  /** Ids of conversations that were deleted here: what still writes to them must not bring them back. */
  #forgotten = new Set();
  /** Ends the answers of a conversation that is deleted. @type {(talk: Conversation) => void} */
  onForget = () => {};
  /** Whether a message is being written here; the other tab's copy must not replace it. */
  isBusy = () => false;

  constructor() {
    if (this.#tabs) this.#tabs.onmessage = () => this.#reread();
  }

  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  changed() {
    for (const watcher of [...this.#watchers]) watcher();
  }

  async load(id = "") {
    try {
      await this.#read();
    } catch (error) {
      this.storageError = String(error);
    }
    const found = this.list.find((talk) => talk.id === id);
    if (found) this.talk = found;
    else await this.begin();
    this.changed();
  }

  async #read() {
    this.list = (await kept("conversations", "getAll")).sort((a, b) => b.updated - a.updated);
    this.prompts = await kept("prompts", "getAll");
  }

  /** Another tab has written. */
  async #reread() {
    if (this.isBusy()) return;
    await this.#read().catch(() => {});
    const same = this.list.find((talk) => talk.id === this.talk?.id);
    if (same) this.talk = same;
    this.changed();
  }

  /** A new conversation with the settings used last; it is kept from its first message on. */
  async begin() {
    const last = await kept("state", "get", "settings").catch(() => null);
    this.talk = {
      id: randomId(), title: "", created: Date.now(), updated: Date.now(),
      settings: { ...noSettings(), ...last?.value }, nodes: {}, chosen: {},
    };
    this.changed();
  }

  /** @param {string} id */
  choose(id) {
    this.talk = this.list.find((talk) => talk.id === id) ?? this.talk;
    this.changed();
  }

  /** Add a message below `parent` and choose it. @param {Partial<Node>} fields @returns {Node} */
  add(talk, parent, fields) {
    const order = 1 + Math.max(-1, ...children(talk, parent).map((n) => n.order));
    /** @type {Node} */
    const node = { id: randomId(6), parent, order, role: "user", text: "", ...fields };
    talk.nodes[node.id] = node;
    talk.chosen[parent] = node.id;
    if (!talk.title && node.role === "user") talk.title = node.text.trim().slice(0, 80) || node.parts?.[0]?.name || "…";
    if (!this.list.includes(talk) && !this.#forgotten.has(talk.id)) this.list.unshift(talk);
    this.save(talk);
    return node;
  }

  /** Choose the sibling `step` further. */
  turn(talk, node, step) {
    const all = children(talk, node.parent);
    const next = all[all.indexOf(node) + step];
    if (next) talk.chosen[node.parent] = next.id;
    this.save(talk);
  }

  /** Delete a message and all that follows it. */
  remove(talk, node) {
    for (const child of children(talk, node.id)) this.remove(talk, child);
    delete talk.nodes[node.id];
    delete talk.chosen[node.id];
    if (talk.chosen[node.parent] === node.id) delete talk.chosen[node.parent];
    this.save(talk);
  }

  /** Write the conversation; `isSoon`: within a second or two, for answers that still grow. */
  save(talk, isSoon = false) {
    talk.updated = Date.now();
    const write = async () => {
      this.#timer = 0;
      if (this.#forgotten.has(talk.id)) return;
      try {
        await kept("conversations", "put", talk);
        await kept("state", "put", { id: "settings", value: { ...talk.settings, schema: "", format: "none" } });
        this.#tabs?.postMessage("written");
      } catch (error) {
        this.storageError = String(error);
        this.changed();
      }
    };
    if (isSoon) this.#timer ||= setTimeout(write, SAVE_MS);
    else if (Object.keys(talk.nodes).length) {
      clearTimeout(this.#timer);
      write();
    }
    this.changed();
  }

  async forget(talk) {
    this.#end(talk);
    await this.#erase(() => kept("conversations", "delete", talk.id));
    this.list = this.list.filter((one) => one !== talk);
    if (this.talk === talk) await this.begin();
    this.#tabs?.postMessage("written");
    this.changed();
  }

  #end(talk) {
    this.#forgotten.add(talk.id);
    this.onForget(talk);
  }

  /** Delete, also where the browser keeps nothing. @param {() => Promise<any>} work */
  async #erase(work) {
    try {
      await work();
    } catch (error) {
      this.storageError = String(error);
    }
  }

  /** Delete conversations, system prompts and settings. */
  async forgetAll() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    for (const talk of this.list) this.#end(talk);
    for (const table of TABLES) await this.#erase(() => kept(table, "clear"));
    this.list = [];
    this.prompts = [];
    await this.begin();
    this.#tabs?.postMessage("written");
  }

  /** Keep a system prompt under a name; an empty text removes it. */
  async keepPrompt(id, text) {
    if (text) await kept("prompts", "put", { id, text });
    else await kept("prompts", "delete", id);
    this.prompts = await kept("prompts", "getAll");
    this.changed();
  }

  /** Conversations as a file's text. */
  exported(talks = this.list) {
    return JSON.stringify({ format: FORMAT, version: 1, conversations: talks }, null, 1);
  }

  /** Take conversations from a file's text; how many. Throws Error for another format. */
  async imported(text) {
    const read = JSON.parse(text);
    if (read?.format !== FORMAT || !Array.isArray(read.conversations)) throw new Error("format");
    const talks = read.conversations.map(checked);
    for (const talk of talks) {
      this.#forgotten.delete(talk.id);
      await kept("conversations", "put", talk);
    }
    await this.#read();
    if (talks.length) this.choose(talks[0].id);
    this.#tabs?.postMessage("written");
    return talks.length;
  }
}

/** A conversation of a file with the fields that are known, each of its type. */
function checked(given) {
  const text = (value) => (typeof value === "string" ? value : "");
  const nodes = {};
  for (const [id, node] of Object.entries(given?.nodes ?? {})) {
    if (id === ROOT_ID || !["user", "assistant", "tool"].includes(node?.role)) continue;
    const parts = Array.isArray(node.parts) ? node.parts : [];
    const calls = Array.isArray(node.calls) ? node.calls : [];
    nodes[id] = {
      id, parent: text(node.parent) || ROOT_ID, role: node.role, order: Number(node.order) || 0,
      text: text(node.text), thinking: text(node.thinking), call_id: text(node.call_id),
      parts: parts.filter((p) => ["image", "video", "audio"].includes(p?.kind) && text(p.url).startsWith("data:"))
        .map((p) => ({ kind: p.kind, name: text(p.name), url: p.url })),
      calls: calls.map((c) => ({ id: text(c?.id), name: text(c?.name), arguments: text(c?.arguments) })),
      stats: figures(node.stats), finish: text(node.finish) || null,
    };
  }
  const chosen = Object.entries(given?.chosen ?? {}).filter(([, id]) => typeof id === "string");
  const settings = { ...noSettings() };
  for (const [name, value] of Object.entries(given?.settings ?? {})) {
    if (name === "sampling" && value && typeof value === "object") settings.sampling = { ...value };
    else if (name in settings) settings[name] = text(value);
  }
  return {
    id: /^\w{1,64}$/.test(given?.id) ? given.id : randomId(), title: text(given?.title).slice(0, 200) || "…",
    created: Number(given?.created) || Date.now(), updated: Date.now(), settings, nodes: rooted(nodes),
    chosen: Object.fromEntries(chosen),
  };
}

/** The messages below the root: a circle of parents would be followed for ever. */
function rooted(nodes) {
  const below = new Map();
  for (const node of Object.values(nodes)) below.set(node.parent, [...(below.get(node.parent) ?? []), node]);
  const found = [...(below.get(ROOT_ID) ?? [])];
  for (const node of found) found.push(...(below.get(node.id) ?? []));
  return Object.fromEntries(found.map((node) => [node.id, node]));
}

function figures(given) {
  const plain = Object.entries(given ?? {}).filter(([, v]) => ["number", "string"].includes(typeof v));
  return Object.fromEntries(plain);
}
