"""An hour of live events in a minute: the page keeps what it shows, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui import recorded_feed
from tests.ui.conftest import sync_api

FRAMES = 36_000  # ten a second
BATCH = 1_000
MAX_GROWTH_BYTES = 5e6
# fetch of /live/events answers with a stream that the test fills
FEED = """
const ask = window.fetch.bind(window);
window.fetch = (url, options) => {
  if (!String(url).includes("/live/events")) return ask(url, options);
  const stream = new ReadableStream({ start: (to) => (window.feed = to) });
  const headers = { "Content-Type": "text/event-stream" };
  return Promise.resolve(new Response(stream, { headers }));
};
"""
# the clock stands still, so the page draws only when the test lets it run
PUSH = """async ([requests, steps, head, hello, first, count]) => {
  const encoder = new TextEncoder();
  const send = (event, data) =>
    window.feed.enqueue(encoder.encode(`event: ${event}\\ndata: ${JSON.stringify(data)}\\n\\n`));
  const turn = () => new Promise((done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = done;
    port2.postMessage(0);
  });
  if (first === 0) send("hello", hello);
  const columns = Object.keys(steps.columns);
  for (let i = first; i < first + count; i++) {
    const at = 5000 + i / 10;
    const rows = requests.rows.slice(0, 2).map((row, k) => ({
      ...row, id: `${i}-${k}`, begun_s: at, ended_s: at + 1, spans: [["decode", at, at + 1, 9]],
    }));
    send("requests", { rows });
    const part = Object.fromEntries(columns.map((name) => [name, steps.columns[name].slice(0, 8)]));
    part.start_s = part.start_s.map((_, k) => at + k / 100);
    const index = part.start_s.map((_, k) => i * 8 + k);
    send("steps", { ...steps, first: i * 8, index, columns: part });
    if (i % 10 === 0) send("head", { ...head, t: at });
    if (i % 20 === 0) await turn();
  }
  await turn();
}"""


def _heap_bytes(session: Any) -> float:
    session.send("HeapProfiler.collectGarbage")
    used: float = session.send("Runtime.getHeapUsage")["usedSize"]
    return used


@pytest.mark.slow
def test_an_hour_of_events_leaves_no_heap(page: Any) -> None:
    page.add_init_script(FEED)
    page.clock.install()
    page.goto("/ui/#/live")
    sync_api.expect(page.locator("main.view-live h1").first).to_be_attached()
    session = page.context.new_cdp_session(page)
    frames = dict(getattr(recorded_feed, name)() for name in ("requests", "steps", "head"))
    args = [frames["requests"], frames["steps"], frames["head"], recorded_feed.hello()[1]]
    early = 0.0
    for first in range(0, FRAMES, BATCH):
        page.evaluate(PUSH, [*args, first, BATCH])
        page.clock.run_for(200)
        if first == 4 * BATCH:  # what is kept is full
            early = _heap_bytes(session)
    late = _heap_bytes(session)
    assert late - early < MAX_GROWTH_BYTES, (early, late)
    assert late < 60e6
