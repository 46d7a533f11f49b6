// Texts of the shell. A view keeps its own in views/<view>_messages.js.

/** @type {Record<string, string>} */
const messages = {
  "app.skip": "Skip to content",
  "app.nav": "Views",
  "app.loading": "Loading …",
  "app.failed": "This view could not be shown.",
  "app.reload": "Reload",
  "app.theme": "Change to {theme} colours",
  "app.light": "light",
  "app.dark": "dark",
  "app.key": "Key",
  "status.connecting": "connecting",
  "status.open": "connected",
  "status.idle": "",
  "status.back": "server is back",
  "status.lost": "server unreachable, trying again",
  "status.refused": "key refused",
  "key.title": "API key",
  "key.why": "The server needs a key for this.",
  "key.where": "It is kept in this tab only and sent as a header, never in an address.",
  "key.label": "Key",
  "key.save": "Use key",
  "key.forget": "Forget key",
  "key.cancel": "Cancel",
  "view.chat": "Chat",
  "view.live": "Live",
  "view.tree": "Tree",
  "view.play": "Playground",
  "view.server": "Server",
  "view.docs": "API",
  "view.workers": "Workers",
};

/** Add the texts of a view. @param {Record<string, string>} texts */
export function addMessages(texts) {
  Object.assign(messages, texts);
}

/** The text named `key`, with `{name}` replaced. @param {string} key @param {object} [values] */
export function t(key, values = {}) {
  const text = messages[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}
