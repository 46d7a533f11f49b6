"""Streams outlive their workers: real servers are killed amid streams, and nobody notices.

The long form is `make router-chaos`: 20 kills under 64 streams, three servers.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server import RunningServer
from tests.fakes.lora_adapters import write_adapter
from tests.router.client import Response, ask
from tests.router.processes import Process, free_port, gateway_process

ASSETS = Path(__file__).parents[2] / "src" / "radixlm" / "assets"
pytestmark = pytest.mark.skipif(not (ASSETS / "radix-tiny").exists(), reason="no bundled model")
NUM_KILLS = int(os.environ.get("CHAOS_KILLS", "20"))
LIMIT_S = 300.0
AGES = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 12}
NAME = {"type": "string", "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {"name": NAME, "ages": AGES},
    "required": ["name", "ages"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
NOTE = {"type": "string", "minLength": 60, "maxLength": 80}
PARAMETERS = {"type": "object", "properties": {"text": NOTE}, "required": ["text"]}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}


def chat(text: str, new: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A chat stream that does not end by itself."""
    base = {"messages": [{"role": "user", "content": text}], "max_tokens": new, "stream": True}
    return "/v1/chat/completions", base | {"temperature": 0, "ignore_eos": True} | fields


def call(number: int, new: int) -> tuple[str, dict[str, Any]]:
    """Stream ``number`` of the mix: path and body."""
    text = f"Tell me about number {number} and its {number % 7} neighbours."
    sampled = {"temperature": 0.9, "seed": number}
    free: dict[str, Any] = {"max_tokens": new, "stream": True, "ignore_eos": True}
    sampling = {"max_new_tokens": new, "min_new_tokens": new, "sampling_seed": number}
    sampling |= {"temperature": 0.8, "repetition_penalty": 1.2}
    message = {"model": "radix-tiny", "messages": [{"role": "user", "content": text}]}
    kinds = (
        lambda: chat(text, new),
        lambda: chat(text, new, **sampled, frequency_penalty=0.4, presence_penalty=0.2),
        lambda: chat(text, new, **sampled, ignore_eos=False, response_format=FORMAT),
        lambda: chat(text, new, **sampled, logprobs=True, top_logprobs=2),
        lambda: chat(text, new // 2, **sampled, n=2),
        lambda: chat(text, new, **sampled, ignore_eos=False, tools=[TOOL], tool_choice="required"),
        lambda: chat(text, new, **sampled, model="radix-tiny:upper", stop=["zqx"], min_p=0.02),
        lambda: ("/v1/completions", free | sampled | {"prompt": text, "logprobs": 1}),
        lambda: ("/generate", {"text": text, "stream": True, "sampling_params": sampling}),
        lambda: ("/v1/messages", message | free | {"temperature": 0}),
    )
    return kinds[number % len(kinds)]()


def digest(answer: Response) -> Any:
    """What a stream says, however its tokens were put into events: texts, calls, logprobs, ends."""
    assert answer.status == 200 and answer.is_complete, answer
    said: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if value:
            said[key] = said[key] + value if key in said else value

    for event in answer.events:
        assert event == "[DONE]" or "error" not in event, event
        if event == "[DONE]":
            add("end", "[DONE]")
        elif "text" in event:  # /generate tells all so far
            said["text"], said["ids"] = event["text"], event.get("output_ids")
            said["why"] = event["meta_info"]["finish_reason"]
        elif event.get("type") == "content_block_delta":
            add("text", event["delta"].get("text"))
        for choice in event.get("choices", []) if isinstance(event, dict) else []:
            name, delta = str(choice["index"]), choice.get("delta") or choice
            add(name + " text", delta.get("content") or choice.get("text"))
            add(name + " reasoning", delta.get("reasoning_content"))
            add(name + " end", choice.get("finish_reason"))
            for tool in delta.get("tool_calls") or []:
                add(f"{name} tool {tool['index']} name", tool["function"].get("name"))
                add(f"{name} tool {tool['index']}", tool["function"].get("arguments"))
            logprobs = choice.get("logprobs") or {}
            add(name + " logprobs", logprobs.get("content") or logprobs.get("token_logprobs"))
    assert said
    return said


class Cluster:
    """Servers, and a gateway in front of them."""

    def __init__(self, num_servers: int, adapter: Path) -> None:
        self.stack, self.adapter = ExitStack(), adapter
        self.ports = [free_port() for _ in range(num_servers)]
        self.servers: list[RunningServer] = []
        self.gateway: Process | None = None

    def server(self, port: int) -> RunningServer:
        """A server on ``port``."""
        flags = (
            "--port",
            str(port),
            "--lora-paths",
            f"upper={self.adapter}",
            "--log-level",
            "info",
        )
        return RunningServer(*flags, model="radix-tiny", timeout_s=120)

    def __enter__(self) -> Cluster:
        with self.stack:
            self.stack.callback(self.stop_servers)
            for port in self.ports:
                self.servers.append(self.server(port))
            urls = [server.url for server in self.servers]
            flags = ("--policy", "round_robin", "--health-check-interval-secs", "1")
            self.gateway = gateway_process("--worker-urls", *urls, *flags)
            self.stack.callback(self.gateway.kill)
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def stop_servers(self) -> None:
        """Those that run now."""
        for server in self.servers:
            server.client.close()
            server.stop()

    def num_ready(self) -> int:
        """Workers that the gateway may use."""
        assert self.gateway is not None
        return sum(one["is_healthy"] for one in self.gateway.ask("/workers")["workers"])

    async def round(self, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        """All streams at once."""
        assert self.gateway is not None
        url = self.gateway.url
        answers = [ask(url, "POST", path, body, limit_s=LIMIT_S) for path, body in calls]
        return [digest(answer) for answer in await asyncio.gather(*answers)]

    def num_moved(self) -> int:
        """Streams that went on at another worker."""
        assert self.gateway is not None
        with urllib.request.urlopen(self.gateway.url + "/metrics", timeout=10) as answer:
            found = re.findall(
                r"streams_moved_total\{[^}]*resumed[^}]*\} (\d+)", answer.read().decode()
            )
        return sum(map(int, found))

    async def restart(self, number: int) -> None:
        """A new server on the port of one that was killed; returns once the gateway uses it."""
        await asyncio.to_thread(self.servers[number].stop)
        self.servers[number].client.close()
        self.servers[number] = await asyncio.to_thread(self.server, self.ports[number])
        ends_s = time.monotonic() + 60
        while await asyncio.to_thread(self.num_ready) < len(self.ports):
            assert time.monotonic() < ends_s, "the gateway does not find the new server"
            await asyncio.sleep(0.1)


async def chaos(folder: Path, num_servers: int, num_streams: int, new: int, num_kills: int) -> None:
    """A round of streams for each kill, and further ones while fewer streams than kills have moved;
    each round as the calm one."""
    calls = [call(number, new) for number in range(num_streams)]
    adapter, draw = write_adapter(ASSETS / "radix-tiny", folder), random.Random(23)
    with Cluster(num_servers, adapter) as cluster:
        while cluster.num_ready() < num_servers:
            await asyncio.sleep(0.05)
        calm = await cluster.round(calls)
        began_s = time.monotonic()
        assert await cluster.round(calls) == calm
        calm_s = time.monotonic() - began_s
        num_before = 0
        for number in range(4 * num_kills):
            if number >= num_kills and num_before >= num_kills:
                break
            victim = draw.randrange(num_servers)
            streams = asyncio.create_task(cluster.round(calls))
            await asyncio.sleep(calm_s * draw.uniform(0.2, 0.6))
            os.kill(cluster.servers[victim].process.pid, signal.SIGKILL)
            for index, (got, want) in enumerate(zip(await streams, calm, strict=True)):
                assert got == want, (number, calls[index])
            num_moved = cluster.num_moved()
            print(f"kill {number}: {num_moved - num_before} streams moved, all are as before")
            num_before = num_moved
            await cluster.restart(victim)
        assert num_before >= num_kills


@pytest.mark.timeout(240)
async def test_a_server_is_killed_amid_a_mix_of_streams(tmp_path: Path) -> None:
    """Two servers, one kill, ten streams: each is as in the calm run."""
    await chaos(tmp_path, 2, 10, 60, 1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_twenty_kills_under_64_streams(tmp_path: Path) -> None:
    """The long form."""
    await chaos(tmp_path, 3, 64, 150, NUM_KILLS)
