// What all views share: facts of the server, the key, and one stream of live events.

import { api, keys } from "./http.js";

const BACKOFF_MS = [500, 1000, 2000, 4000, 8000];
const SILENCE_MS = 15_000; // the server sends a heartbeat every 5 s

class Store {
  /** @type {{version: string, model: string | null, is_gateway: boolean, has_key: boolean,
   *  needs_key: boolean, show_text: boolean}} */
  info = { version: "", model: null, is_gateway: false, has_key: false, needs_key: false, show_text: false };
  /** `idle`: no view wants events; `back`: the server was away. @type {"idle" | "back" | "connecting" | "open" | "lost" | "refused"} */
  status = "idle";
  /** The last `hello` of the stream. @type {any} */
  hello = null;
  /** @type {Map<(topic: string, data: any) => void, string[]>} */
  #viewers = new Map();
  /** @type {Set<(status: string) => void>} */
  #watchers = new Set();
  /** @type {AbortController | null} */
  #stream = null;
  #wanted = "";
  #failures = 0;
  #timer = 0;
  #lastId = "";
  #isWatched = false;

  get key() {
    return keys.get();
  }

  set key(key) {
    keys.set(key);
    this.#lastId = ""; // another key may see more
    if (this.#viewers.size) this.#restart();
  }

  /** Read /ui/info; the server may be away. */
  async load() {
    this.info = await api("ui/info");
    return this.info;
  }

  /**
   * Hear topics of /live/events: `handler(topic, data)`. All views share one stream.
   * @param {string[]} topics @param {(topic: string, data: any) => void} handler
   */
  subscribe(topics, handler) {
    this.#viewers.set(handler, topics);
    if (this.hello) handler("hello", this.hello);
    this.#settle();
    return () => {
      this.#viewers.delete(handler);
      this.#settle();
    };
  }

  /** @param {(status: string) => void} watcher */
  onStatus(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  /** @param {Store["status"]} status */
  setStatus(status) {
    if (status === this.status) return;
    this.status = status;
    for (const watcher of [...this.#watchers]) watcher(status);
  }

  /** A call found nobody: say so, and ask with growing pauses until the server is back. */
  async watchServer() {
    if (this.#isWatched) return;
    this.#isWatched = true;
    this.setStatus("lost");
    for (let tries = 0; ; tries++) {
      await new Promise((done) => setTimeout(done, BACKOFF_MS[Math.min(tries, BACKOFF_MS.length - 1)]));
      try {
        await this.load();
        break;
      } catch {
        /* still away */
      }
    }
    this.#isWatched = false;
    this.setStatus(this.#wanted ? "connecting" : "back");
    if (this.#wanted) this.#restart();
  }

  /** Open, change or end the stream, once the views of this turn have said what they want. */
  #settle() {
    queueMicrotask(() => {
      const topics = [...new Set([...this.#viewers.values()].flat())].sort().join(",");
      if (topics !== this.#wanted) {
        this.#wanted = topics;
        this.#restart();
      }
    });
  }

  #restart() {
    clearTimeout(this.#timer);
    this.#stream?.abort();
    this.#stream = null;
    this.#failures = 0;
    if (this.#wanted) this.#run();
    else this.setStatus("idle");
  }

  async #run() {
    const stream = (this.#stream = new AbortController());
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => stream.abort(), SILENCE_MS);
    };
    if (this.status !== "lost") this.setStatus("connecting");
    try {
      heard();
      const headers = this.#lastId ? { "Last-Event-ID": this.#lastId } : undefined;
      const path = `live/events?topics=${this.#wanted}&rate=10`;
      const events = await api(path, { stream: true, signal: stream.signal, headers });
      this.#failures = 0;
      this.setStatus("open");
      for await (const { event, data, id } of events) {
        heard();
        if (stream !== this.#stream) return;
        if (id) this.#lastId = id;
        if (event !== "comment" && data) this.#deliver(event, JSON.parse(data));
      }
      if (stream === this.#stream) this.#again("lost");
    } catch (error) {
      if (stream !== this.#stream) return;
      const status = error?.status;
      if (status === 401 || status === 403) this.setStatus("refused");
      else this.#again("lost");
    } finally {
      clearTimeout(silence);
    }
  }

  /** @param {"lost"} status */
  #again(status) {
    this.setStatus(status);
    const wait = BACKOFF_MS[Math.min(this.#failures++, BACKOFF_MS.length - 1)];
    this.#timer = setTimeout(() => this.#run(), wait);
  }

  /** @param {string} topic @param {any} data */
  #deliver(topic, data) {
    if (topic === "hello") this.hello = data;
    for (const [handler, topics] of [...this.#viewers]) {
      if (topic === "hello" || topics.includes(topic)) handler(topic, data);
    }
  }
}

export const store = new Store();
