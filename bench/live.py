"""Tokens a second of concurrent streams while 0, 1 and 8 viewers read /live/events.

python bench/live.py [--streams 16] [--tokens 200] [--rounds 5] [--viewers 0 1 8] [-- SERVE OPTIONS]

One server of the bundled model. In each round every number of viewers has its turn, in an order
that rotates; the ratio is that of the turn to the turn without viewers of the same round. Prints
medians and quartiles. The streams and the viewers are read in this process, which shares the cores.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from server_process import ServerProcess

TOPICS = "head,requests,steps,deaths,log,tree"


async def opened(address, text):
    """A connection on which ``text`` was sent."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(text.encode())
    await writer.drain()
    return reader, writer


async def stream(address, name, tokens):
    """One stream of so many tokens, read to its end."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    prompt = f"Story {name}: once upon a time"
    body = json.dumps({"text": prompt, "stream": True, "sampling_params": sampling})
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await opened(address, head + body)
    tail = b""
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-64:]
    assert b"[DONE]" in tail, tail
    writer.close()


async def look(address, counts):
    """Read the feed until cancelled; its bytes are counted."""
    head = f"GET /live/events?topics={TOPICS} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reader, writer = await opened(address, head)
    try:
        while data := await reader.read(1 << 16):
            counts.append(len(data))
    finally:
        writer.close()


async def turn(address, options, num_viewers, counts):
    """Tokens a second of one turn."""
    viewers = [asyncio.create_task(look(address, counts)) for _ in range(num_viewers)]
    await asyncio.sleep(0.3)
    began_s = time.perf_counter()
    streams = (stream(address, i, options.tokens) for i in range(options.streams))
    await asyncio.gather(*streams)
    seconds = time.perf_counter() - began_s
    for viewer in viewers:
        viewer.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    return options.streams * options.tokens / seconds


async def measure(options):
    """Rates by number of viewers, one each round; and the bytes that viewers got."""
    rates, counts = {count: [] for count in options.viewers}, []
    log = Path(tempfile.gettempdir()) / "radixlm_bench_live.log"
    async with ServerProcess(options.serve, log) as server:
        address = ("127.0.0.1", server.port)
        await turn(address, options, 0, [])  # warm-up
        for number in range(options.rounds):
            at = number % len(options.viewers)
            for count in options.viewers[at:] + options.viewers[:at]:
                rates[count].append(await turn(address, options, count, counts))
    return rates, sum(counts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--viewers", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("serve", nargs="*", help="options of `radixlm serve`, after --")
    options = parser.parse_args()
    rates, num_bytes = asyncio.run(measure(options))
    for count, found in rates.items():
        ratios = [one / base for one, base in zip(found, rates[options.viewers[0]], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(
            f"{count} viewers: {statistics.median(found):.0f} tokens/s, "
            f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        )
    print(f"viewers got {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
