// Text of a model as Preact nodes. markdown-it makes tokens; no HTML is ever parsed or inserted.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import MarkdownIt from "../vendor/markdown-it.js";
import { t } from "../messages.js";

/** Longer texts are shown as they are: nobody reads them, and parsing would stop the page. */
const MAX_CHARS = 200_000;
const MAX_CODE = 60_000;
const MAX_LIVE_CODE = 6_000;
/** A formula that is not closed within these is none: each mark would search the whole text. */
const MAX_TEX = 2_000;
const MAX_TEX_LINES = 50;
const SAFE_LINK = /^https?:\/\//i;
const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[a-z0-9+/=]+$/i;
const BLOCKS = new Set("p ul ol li blockquote table thead tbody tr strong em s".split(" "));

const parser = new MarkdownIt({ html: false, linkify: true, breaks: false });
parser.linkify.set({ fuzzyEmail: false, fuzzyIP: false, fuzzyLink: false });
parser.inline.ruler.before("escape", "math", inlineMath);
parser.block.ruler.before("fence", "math_block", blockMath, {
  alt: ["paragraph", "blockquote", "list"],
});

/** `$x$`, `$$x$$`, `\(x\)` and `\[x\]` within a line. */
function inlineMath(state, silent) {
  const { src, pos } = state;
  const open = ["$$", "$", "\\(", "\\["].find((mark) => src.startsWith(mark, pos));
  if (!open) return false;
  const close = { "\\(": "\\)", "\\[": "\\]" }[open] ?? open;
  const start = pos + open.length;
  const length = src.slice(start, start + MAX_TEX).indexOf(close);
  const end = start + length;
  if (length < 0 || end >= state.posMax) return false;
  const tex = src.slice(start, end);
  // "$5 and $6" is money
  if (!tex.trim() || (open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(src[end + 1] ?? "")))) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = tex;
    token.hidden = open === "$$" || open === "\\[";
  }
  state.pos = end + close.length;
  return true;
}

/** `$$` or `\[` on a line of its own, up to the line that closes it. */
function blockMath(state, start, end, silent) {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]).trim();
  const close = { $$: "$$", "\\[": "\\]" }[line(start)];
  if (!close) return false;
  const most = Math.min(end, start + MAX_TEX_LINES);
  let last = start + 1;
  while (last < most && line(last) !== close) last++;
  if (last >= most) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = state.getLines(start + 1, last, 0, false);
    token.hidden = true;
    token.block = true;
  }
  state.line = last + 1;
  return true;
}

/** @param {{text: string, live?: boolean}} props `live`: the text still grows */
export function Markdown({ text, live = false }) {
  return useMemo(() => {
    if (text.length > MAX_CHARS) return html`<pre class="md plain">${text}</pre>`;
    try {
      return html`<div class="md" dir="auto">${nodes(parser.parse(text, {}), live)}</div>`;
    } catch {
      return html`<pre class="md plain">${text}</pre>`;
    }
  }, [text, live]);
}

function nodes(tokens, live) {
  const stack = [{ token: null, children: [] }];
  for (const token of tokens) {
    if (token.nesting === 1) stack.push({ token, children: [] });
    else if (token.nesting === -1) {
      if (stack.length === 1) continue;
      const { token: opened, children } = stack.pop();
      stack.at(-1).children.push(element(opened, children));
    } else stack.at(-1).children.push(leaf(token, live));
  }
  while (stack.length > 1) {
    const { token, children } = stack.pop();
    stack.at(-1).children.push(element(token, children));
  }
  return stack[0].children;
}

function element(token, children) {
  const { tag } = token;
  if (token.hidden) return children;
  if (tag === "a") return link(token.attrGet("href") ?? "", children);
  // the page has one h1, so headings of answers begin at the third level
  if (/^h[1-6]$/.test(tag)) {
    const Tag = `h${Math.min(6, Number(tag[1]) + 2)}`;
    return html`<${Tag}>${children}</${Tag}>`;
  }
  if (tag === "td" || tag === "th") {
    const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1];
    const Cell = tag;
    return html`<${Cell} class=${align ? `align-${align}` : null}>${children}</${Cell}>`;
  }
  if (tag === "ol") return html`<ol start=${Number(token.attrGet("start") ?? 1)}>${children}</ol>`;
  if (tag === "table") return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("md.table")}><table>${children}</table></div>`;
  if (!BLOCKS.has(tag)) return children;
  const Tag = tag;
  return html`<${Tag}>${children}</${Tag}>`;
}

function leaf(token, live) {
  const { type, content } = token;
  if (type === "inline") return nodes(token.children ?? [], live);
  if (type === "fence" || type === "code_block") {
    const language = token.info?.trim().split(/\s+/)[0] ?? "";
    return html`<${Code} code=${content} language=${language} live=${live} />`;
  }
  if (type === "code_inline") return html`<code>${content}</code>`;
  if (type === "softbreak") return "\n";
  if (type === "hardbreak") return html`<br />`;
  if (type === "hr") return html`<hr />`;
  if (type === "image") return picture(token.attrGet("src") ?? "", token.content);
  if (type === "math") return html`<${Formula} tex=${content} block=${token.hidden} />`;
  return content;
}

/** A link names its host where its text does not. */
function link(href, children) {
  if (!SAFE_LINK.test(href)) return html`<span>${children} <span class="muted">(${href})</span></span>`;
  let host = href;
  try {
    host = new URL(href).host;
  } catch {
    return children;
  }
  const isShown = children.some((child) => typeof child === "string" && child.includes(host));
  return html`<a href=${href} target="_blank" rel="noopener noreferrer" title=${href}>${children}</a>${
    !isShown && html` <span class="muted small">(${host})</span>`}`;
}

/** Pictures of other origins are not loaded: their addresses would tell what was asked. */
function picture(src, alt) {
  if (SAFE_IMAGE.test(src)) return html`<img src=${src} alt=${alt || t("md.picture")} />`;
  return html`<span class="muted">[${t("md.picture")}: ${alt}]</span> ${
    SAFE_LINK.test(src) ? link(src, [src.slice(0, 80)]) : src.slice(0, 80)}`;
}

let highlighter = null;

export function Code({ code, language, live = false }) {
  const [library, setLibrary] = useState(highlighter);
  const isShort = code.length <= (live ? MAX_LIVE_CODE : MAX_CODE);
  useEffect(() => {
    let isOn = true;
    if (!library && isShort && language) {
      import("../vendor/highlight.js").then((module) => {
        highlighter = module.default;
        if (isOn) setLibrary(() => highlighter);
      }, () => {});
    }
    return () => (isOn = false);
  }, [library, isShort, language]);
  const shown = useMemo(() => {
    if (!library || !isShort || !library.getLanguage(language)) return code;
    try {
      return colours(library.highlight(code, { language, ignoreIllegals: true })._emitter.root);
    } catch {
      return code;
    }
  }, [library, code, language, isShort]);
  return html`<div class="code">
    <div class="code-head"><span>${language.slice(0, 30) || t("md.code")}</span><${CopyButton} text=${code} /></div>
    <pre tabindex="0"><code>${shown}</code></pre>
  </div>`;
}

/** The tree of highlight.js as spans. */
function colours(node) {
  if (typeof node === "string") return node;
  const children = node.children.map(colours);
  const scope = typeof node.scope === "string" ? node.scope.split(".")[0].replace(/\W/g, "") : "";
  return scope ? html`<span class=${`hl-${scope}`}>${children}</span>` : children;
}

/** A formula as MathML; its source until KaTeX is there, and where KaTeX refuses it. */
function Formula({ tex, block }) {
  const place = useRef(null);
  const [isDrawn, setDrawn] = useState(false);
  useEffect(() => {
    let isOn = true;
    import("../vendor/katex.js").then(({ default: katex }) => {
      if (!isOn || !place.current) return;
      try {
        katex.render(tex, place.current, {
          output: "mathml", displayMode: block, throwOnError: true, trust: false,
          strict: "ignore", maxSize: 20, maxExpand: 200,
        });
        setDrawn(true);
      } catch {
        place.current.replaceChildren();
        setDrawn(false);
      }
    }, () => {});
    return () => (isOn = false);
  }, [tex, block]);
  return html`<span class=${block ? "math block" : "math"}><span ref=${place}></span>${
    !isDrawn && html`<code>${tex}</code>`}</span>`;
}

/** Copies a text; pages of plain http have no clipboard API. @param {string} text */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** @param {{text: string | (() => string), label?: string, kind?: string}} props */
export function CopyButton({ text, label, kind = "quiet small" }) {
  const [isDone, setDone] = useState(false);
  const click = async () => {
    await copy(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class=${kind} onClick=${click}>${
    isDone ? t("md.copied") : label ?? t("md.copy")}</button>`;
}
