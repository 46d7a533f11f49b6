"""Hundreds of loads and unloads beside traffic: nothing is kept, nothing fails."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.lora.test_serving import ARCH, serving

ROUNDS = 50  # of a load and an unload


async def test_hundreds_of_loads_and_unloads(tmp_path: Path) -> None:
    base = cached_tiny(ARCH)
    folders = [write_adapter(base, tmp_path / f"{i}", 2, r"q_proj$", seed=i) for i in range(2)]
    async with serving(max_running_requests=4) as served:
        await served.load("kept", folders[0])
        wanted = {name: await served.tokens(0, name) for name in (None, "kept")}
        is_over, answered = False, 0

        async def traffic(name: str | None) -> None:
            nonlocal answered
            while not is_over or answered <= 20:
                assert await served.tokens(0, name) == wanted[name]
                answered += 1

        clients = [asyncio.ensure_future(traffic(name)) for name in (None, "kept")]
        adapters = served.engine.intake.adapters
        for number, folder in zip(range(ROUNDS), itertools.cycle(folders), strict=False):
            await adapters.load("x", str(folder))
            if number % 50 == 0:
                await served.tokens(1, "x")
            await adapters.unload("x")
        is_over = True
        await asyncio.gather(*clients)
        assert answered > 20 and adapters.num_failed == 0
        assert set(adapters.loaded) == {"kept"}
        reply = await served.engine.intake.control("info")
        assert reply.ok and reply.data["num_breaches"] == 0
        assert served.engine._serving is not None
        runner: Any = served.engine._serving.scheduler.executor
        assert len(runner.adapters) == 1
