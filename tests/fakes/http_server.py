"""The whole HTTP server over a real scheduler and a scripted model, in this process.

`ScriptedServer` has an engine in a thread and an httpx client that calls the application without a
socket. The model answers with the script's text for the first key that occurs in the prompt.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson

from radixlm.arch.spec import Pool
from radixlm.config.server_config import ServerConfig
from radixlm.engine.intake import ServerIntake
from radixlm.engine.model_info import ModelInfo
from radixlm.entrypoints.http.app import create_app, make_uvicorn
from radixlm.hidden_outputs.buffer import OutputBuffer
from radixlm.intake.facts import IntakeFacts
from radixlm.live_feed.step_recorder import StepRecorder
from radixlm.live_feed.tree_view import TreeView
from radixlm.memory.pages import PageAllocator
from radixlm.memory.prefix.radix import RadixCache
from radixlm.memory.slots import SlotAllocator
from radixlm.observe.ring import StepRing
from radixlm.operations.commands import OperatorCommands
from radixlm.operations.deadlines import RequestDeadlines
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.loop import Scheduler
from radixlm.self_check.kv_cache import SelfCheck, find_violations
from radixlm.step.masks import Masks
from radixlm.step.plan import Item, StepPlan
from radixlm.step.result import ItemResult, StepResult
from radixlm.text.tokenizer import Tokenizer, load_tokenizer
from radixlm.weight_updates.commands import WeightCommands
from radixlm.wire.channel import MemoryChannel
from radixlm.wire.link import ThreadLink
from radixlm.wire.replies import Logprobs, Ready
from radixlm.wire.requests import Shutdown
from tests.fakes import toy_tokenizer
from tests.fakes.step_results import step_result

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}"""
PAGE = 4
CONTEXT = 2048
EMBED_DIM = 4
MAX_RUNNING = 8
DEFAULT_ANSWER = "Hello there."
FOREVER = "forever"
SLOW_S = 0.01


class ScriptedExecutor:
    """Answers by the script; each token has log-probability -0.5, the next candidate -1.5."""

    def __init__(self, tokenizer: Tokenizer, eos: int, script: Mapping[str, str]) -> None:
        self.tokenizer, self.eos, self.script = tokenizer, eos, dict(script)
        self.answers: dict[str, list[int]] = {}
        self.place: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.is_slow = False

    def forward(self, plan: StepPlan) -> StepPlan:
        for admission in plan.admissions:
            prompt = self.tokenizer.decode(admission.prompt_ids.tolist(), skip_special_tokens=False)
            text = next((t for key, t in self.script.items() if key in prompt), DEFAULT_ANSWER)
            ids = self.tokenizer.encode(text, False)
            self.answers[admission.rid] = ids * 4096 if FOREVER in prompt else [*ids, self.eos]
            self.place[admission.rid] = len(admission.output_ids)
            self.first[admission.rid] = int(admission.prompt_ids[0])
            self.length[admission.rid] = len(admission.prompt_ids)
        return plan

    def sample(self, step: StepPlan, masks: Masks) -> None:
        if self.is_slow:
            time.sleep(SLOW_S)

    def read(self, step: StepPlan) -> StepResult:
        return step_result(step.items, [self._result(item) for item in step.items])

    def _result(self, item: Item) -> ItemResult:
        got = ItemResult()
        if item.pooling is not None and item.pooling.per_token:
            rows = np.asarray(item.tokens, np.float32)[:, None] + np.arange(EMBED_DIM) + 1
            got.hidden_states = rows.astype(np.float32).tobytes()
            got.pooled = [] if item.start + item.count == self.length[item.rid] else None
            return got
        if item.pooling is not None:
            if item.start + item.count == self.length[item.rid]:
                scale = 2.0 if item.pooling.is_raw else 1.0
                got.pooled = [3.0 * scale, (4.0 + self.first[item.rid]) * scale]
                got.pooled += [0.5] * EMBED_DIM if item.pooling.with_hidden else []
            return got
        if item.targets is not None and item.logprobs is not None:
            got.prompt_logprobs = self._logprobs(item.targets.tolist(), item.logprobs.top)
            if item.start + item.targets_at == 0 and item.logprobs.prompt_from == 0:
                got.prompt_logprobs.chosen.insert(0, (None, self.first[item.rid]))
                got.prompt_logprobs.top.insert(0, None)
                got.prompt_logprobs.asked.insert(0, None)
        if item.emit:
            answer = self.answers[item.rid]
            place = self.place[item.rid]
            self.place[item.rid] += 1
            got.tokens = (answer[min(place, len(answer) - 1)],)
            if item.logprobs is not None:
                got.logprobs = self._logprobs(list(got.tokens), item.logprobs.top)
                if item.logprobs.token_ids:
                    got.logprobs.asked = [[(-float(i), i) for i in item.logprobs.token_ids]]
        return got

    def _logprobs(self, ids: list[int], top: int) -> Logprobs:
        rows = [[(-0.5, i), *((-1.5 - k, (i + k + 1) % 500) for k in range(top - 1))] for i in ids]
        tops: list[Any] = [row[:top] for row in rows] if top else [None] * len(ids)
        return Logprobs([(-0.5, i) for i in ids], tops, [None] * len(ids))

    def control(self, verb: str, args: dict[str, Any]) -> Any:
        return {"verb": verb} | args


class FakeEngine:
    """The scripted engine with the interface of ProcessEngine."""

    def __init__(self, tokenizer: Tokenizer, facts: IntakeFacts, script: Mapping[str, str]) -> None:
        mine, self.theirs = MemoryChannel.pair()
        self.intake = ServerIntake(tokenizer, facts, ThreadLink(mine))
        self.executor = ScriptedExecutor(tokenizer, facts.eos_ids[0], script)
        limits = Limits(
            max_running=MAX_RUNNING,
            max_queued=64,
            step_tokens=256,
            max_prefill_tokens=4096,
            context_len=facts.context_len,
            page_size=PAGE,
            eos_ids=facts.eos_ids,
            vocab=facts.vocab,
        )
        pages = PageAllocator(4096, PAGE)
        self.kv_manager = KVCacheManager(
            pages, SlotAllocator(MAX_RUNNING), RadixCache(pages, PAGE), PAGE
        )
        ring = StepRing()
        self.intake.rings = (ring,)
        self.scheduler = Scheduler(
            limits,
            self.executor,
            self.theirs,
            self.kv_manager,
            Hooks((OutputBuffer(),)),
            recorder=StepRecorder(ring),
            commands=(OperatorCommands, WeightCommands, TreeView, SelfCheck),
        )
        self.scheduler.deadlines = RequestDeadlines(self.scheduler)
        self.thread = threading.Thread(target=self.scheduler.run, daemon=True)

    def start(self) -> None:
        self.intake.start()
        self.thread.start()
        self.theirs.send(Ready({"max_total_num_tokens": 4096 * PAGE, "context_len": CONTEXT}))

    def stop(self) -> None:
        self.intake.replicas.send(Shutdown())
        self.thread.join(60)
        self.intake.replicas.close()
        assert not self.thread.is_alive(), "the scheduler does not stop"
        assert find_violations(self.kv_manager) == []


class ScriptedServer:
    """The application under test and its client."""

    def __init__(self, folder: Path, script: Mapping[str, str], **options: Any) -> None:
        self.tokenizer = make_tokenizer(folder)
        eos = self.tokenizer.token_id("<|im_end|>")
        assert eos is not None
        pool = Pool(after="unit") if options.pop("is_pooled", False) else None
        facts = IntakeFacts(
            self.tokenizer.vocab_size,
            CONTEXT,
            eos_ids=(eos,),
            is_generation=pool is None,
            embed_dim=EMBED_DIM,
        )
        options = {"model_path": str(folder), "served_model_name": "tiny"} | options
        self.config = ServerConfig.from_kwargs(**options)
        self.config = self.config.with_values({"log_level_http": "info"})
        self.engine = FakeEngine(self.tokenizer, facts, script)
        shown = None if self.config.model.skip_tokenizer_init else self.tokenizer
        self.engine.intake.tokenizer = shown
        decoder: Any = SimpleNamespace(vocab=facts.vocab, pool=pool, encoder=None)
        info = ModelInfo(folder, decoder, "Toy", "toy", CONTEXT, (eos,), {"temperature": 0.0})
        self.app = create_app(self.config, info, shown, self.engine.intake)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    @property
    def state(self) -> Any:
        return self.app.state.server

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The data of all events of a stream. The end mark must be there and is left out."""
        got = await self.client.post(path, json=body | {"stream": True})
        assert got.status_code == 200, got.text
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = [part for part in got.text.split("\n\n") if part]
        assert lines.pop() == "data: [DONE]"
        return [orjson.loads(line.removeprefix("data: ")) for line in lines]


def make_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer with a chat template for reasoning and tool calls."""
    if not (folder / "tokenizer.json").exists():
        built = toy_tokenizer.build("byte_level")
        toy_tokenizer.save(built, folder, chat_template=TEMPLATE, eos_token="<|im_end|>")
    return load_tokenizer(folder)


@asynccontextmanager
async def scripted_server(
    folder: Path, script: Mapping[str, str], **options: Any
) -> AsyncIterator[ScriptedServer]:
    """A running server; at the end the KV accounting must balance."""
    made = ScriptedServer(folder, script, **options)
    made.engine.start()
    try:
        await asyncio.wait_for(made.engine.intake.ready.wait(), 60)
        yield made
    finally:
        await made.client.aclose()
        made.engine.stop()


@asynccontextmanager
async def listening(
    server: ScriptedServer, sock: socket.socket | None = None
) -> AsyncIterator[int]:
    """The server on a real port (or ``sock``), with its real HTTP server."""
    sock = sock or socket.create_server(("127.0.0.1", 0))
    uvicorn = make_uvicorn(server.app, server.config)
    task = asyncio.create_task(uvicorn.serve(sockets=[sock]))
    try:
        async with asyncio.timeout(60):
            while not uvicorn.started:
                await asyncio.sleep(0)
        name = sock.getsockname()
        yield name[1] if isinstance(name, tuple) else 0
    finally:
        uvicorn.should_exit = True
        await task
