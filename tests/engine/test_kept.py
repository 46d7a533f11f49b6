"""--warm-restart with ranks: each finds its pools again, and rank 0 what is in them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from radixlm import Engine
from radixlm.base.errors import ConfigError
from radixlm.engine import kept as kept_module
from radixlm.engine.kept import Boot, KeptPages
from tests.fakes.thread_replica import thread_engine
from tests.fakes.tiny_checkpoint import cached_tiny

PROMPTS = [[(7 * i + 3 * j) % 200 + 5 for j in range(70)] for i in range(4)]
PARAMS = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
SIZES: dict[str, Any] = {
    "max_total_tokens": 2048, "page_size": 16, "cpu_threads": 1, "random_seed": 1,
}  # fmt: skip
RANKS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "chunked_prefill_size": 16},
    "attention groups": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}


def ask(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """The tokens, and how many of each prompt were cached. All at once: to both groups."""
    found = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)
    return [one["output_ids"] for one in found], [
        one["meta_info"]["cached_tokens"] for one in found
    ]


def test_an_engine_that_is_a_thread_keeps_nothing() -> None:
    with pytest.raises(ConfigError, match=r"--warm-restart: .* `radixlm serve`"):
        Engine(model_path=str(cached_tiny("Qwen3ForCausalLM")), warm_restart=True)


@pytest.mark.parametrize("name", RANKS)
def test_ranks_find_their_pages_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KeptPages] = []

    class Noted(KeptPages):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(kept_module, "KeptPages", Noted)
    paths = [tmp_path / "rank 0", tmp_path / "rank 1"]
    for path in paths:
        path.touch()
    options = {"model_path": str(cached_tiny("Qwen3ForCausalLM")), "log_level": "error", **SIZES}
    with Engine(**options) as engine:
        plain, _ = ask(engine)
    options |= {**RANKS[name], "warm_restart": True}

    def answers() -> list[int]:
        boot = Boot(memory=tuple(map(str, paths)))
        with thread_engine(monkeypatch, shared=True, boot=boot, **options) as engine:
            tokens, cached = ask(engine)
        assert tokens == plain
        assert all(journal.settle(20.0) for kept in made for journal in kept.journals)
        return cached

    assert answers() == [0] * 4
    assert min(answers()) >= 64
    draw, data = random.Random(4), bytearray(paths[1].read_bytes())
    for at in range(2 << 20, len(data), 64):  # behind the header
        data[at] ^= 1 << draw.randrange(8)
    with paths[1].open("r+b") as file:  # not another file: it is mapped
        file.write(data)
    assert answers() == [0] * 4 if name != "attention groups" else min(answers()) == 0
