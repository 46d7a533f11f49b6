"""Puts a feed of a test's own in the place of /live/events, inside the page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.ui.recorded_feed import Frame

# fetch of the feed answers with a stream that stays open; feed(frames) writes to it
_FAKE = """(first) => {
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (!String(url).includes("live/events")) return real(url, options);
    window.opened = (window.opened ?? 0) + 1;
    const text = new TextEncoder();
    const body = new ReadableStream({ start(stream) {
      window.feed = (frames) => { for (const [event, data] of frames)
        stream.enqueue(text.encode(`event: ${event}\\ndata: ${JSON.stringify(data)}\\n\\n`)); };
      window.feed(first);
    } });
    const headers = { "Content-Type": "text/event-stream" };
    return Promise.resolve(new Response(body, { headers }));
  };
}"""


def feed(page: Any, frames: Iterable[Frame]) -> None:
    """From the page's next load on, its feed begins with ``frames``."""
    page.add_init_script(f"({_FAKE})({json.dumps(list(frames))})")


def send(page: Any, frames: Iterable[Frame]) -> None:
    """Send more frames."""
    page.evaluate("(frames) => window.feed(frames)", list(frames))
