"""Weights that are copied ahead of their use, on simulated streams: the same bits as without."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tests.fakes.tiny_checkpoint import cached_tiny
from torch import Tensor

import radixlm
from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.config.conflicts import conflict_problems
from radixlm.config.server_config import ServerConfig
from radixlm.config.states import no_effect_notes
from radixlm.engine import gpu, live_weights, occupation, offload
from radixlm.layers.module import Module
from radixlm.models.offload import Offloader

PROMPTS = [[5, 9, 12, 40, 7, 7, 81], [3, 200, 17]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}


class SimulatedCopies:
    """Copies at the earliest or at the latest time, by a seed; until then a slot holds NaN."""

    made: ClassVar[list[SimulatedCopies]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self._random = random.Random(len(self.made))
        self._late: dict[int, tuple[Tensor, Tensor]] = {}  # by mark
        self._slot_of: dict[int, int] = {}  # by mark
        self._used: dict[int, int] = {}  # marks of slots
        self._running: int | None = None
        self.num_copies = self._marks = 0

    def _mark(self) -> int:
        self._marks += 1
        return self._marks

    def computed(self) -> int:
        assert self._running is not None
        mark = self._used[self._running] = self._mark()
        self._running = None
        return mark

    def copy(self, target: Tensor, source: Tensor, after: int | None) -> int:
        slot, mark = target.data_ptr(), self._mark()
        assert slot != self._running, "a slot is written while its block runs"
        assert after == self._used.get(slot), "a copy does not wait for the last use of its slot"
        self._slot_of[mark] = slot
        self.num_copies += 1
        target.fill_(0xFF)
        self._late[mark] = target, source
        if self._random.random() < 0.5:
            self._run_to(mark)
        return mark

    def _run_to(self, mark: int) -> None:
        """One stream, in order."""
        for due in [due for due in self._late if due <= mark]:
            target, source = self._late.pop(due)
            target.copy_(source)

    def wait(self, copied: int) -> None:
        assert self._running is None
        self._run_to(copied)
        self._running = self._slot_of[copied]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host as a device with memory of its own."""

    def is_offloading(config: ServerConfig) -> bool:
        return config.memory.cpu_offload_gb > 0 or config.memory.offload_group_size > 0

    for module in (offload, gpu, live_weights, occupation):
        monkeypatch.setattr(module, "is_offloading", is_offloading)
    monkeypatch.setattr(offload, "CudaCopies", SimulatedCopies)
    monkeypatch.setattr(SimulatedCopies, "made", [])


def engine(arch: str = "Qwen3ForCausalLM", **options: Any) -> radixlm.Engine:
    return radixlm.Engine(
        model_path=str(cached_tiny(arch, num_hidden_layers=7)),
        attention_backend="torch_native",
        kernel=["all=reference"],
        max_total_tokens=256,
        cpu_threads=1,
        log_level="error",
        **options,
    )


def tokens(one: radixlm.Engine) -> list[Any]:
    return [a["output_ids"] for a in one.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "MixtralForCausalLM"])
def test_tokens_are_those_of_a_model_that_stays_on_the_device(on_device: None, arch: str) -> None:
    with engine(arch) as plain:
        wanted = tokens(plain)
    assert not SimulatedCopies.made
    for size, num, ahead in [(1, 1, 1), (2, 1, 1), (3, 2, 0), (1, 1, 2), (4, 3, 3), (1, 1, 20)]:
        options = {"offload_group_size": size, "offload_num_in_group": num}
        with engine(arch, offload_prefetch_step=ahead, **options) as one:
            assert tokens(one) == wanted
            assert tokens(one) == wanted
    assert [copies.num_copies for copies in SimulatedCopies.made][-1] == 7  # all have a slot
    assert min(copies.num_copies for copies in SimulatedCopies.made[:-1]) > 7


def test_a_limit_in_gigabytes_spreads_the_layers(on_device: None) -> None:
    with engine() as plain, engine(cpu_offload_gb=1) as one:  # of less: all layers
        assert tokens(one) == tokens(plain)
    choose = offload._choice(ServerConfig.from_kwargs(cpu_offload_gb=1).memory, 8)
    taken, chosen = 0, []
    for index in range(8):
        if choose(index, taken):
            chosen.append(index)
            taken += 1 << 28
    assert taken == 1 << 30
    assert chosen == [0, 2, 4, 6]


def test_what_cannot_be_done_with_offloaded_weights_says_so(on_device: None) -> None:
    with engine(offload_group_size=1, enable_memory_saver=True) as one:
        with pytest.raises(InvalidRequest, match="keeps part of them on the host"):
            one.release_memory_occupation(["weights"])
        wanted = tokens(one)
        one.release_memory_occupation(["kv_cache"])
        one.resume_memory_occupation()
        assert tokens(one) == wanted
        with pytest.raises(InvalidRequest, match="start the server again with"):
            one._wait(_update(one))


async def _update(one: radixlm.Engine) -> None:
    verb = "prepare_weights"
    source = {"folder": str(one.info.folder), "load_format": "auto"}
    reply = await one._engine.intake.control(verb, source=source)
    if not reply.ok:
        raise InvalidRequest(reply.message)


def _block(weight: Tensor) -> Any:
    block: Any = Module()
    block.weight, block.run_deferred = weight, lambda: block.weight.sum()
    return block


@pytest.mark.parametrize("num_taken", [1, 2])
def test_blocks_that_share_a_tensor_are_refused(num_taken: int) -> None:
    model, weight = Module(), torch.ones(4)
    offloader = Offloader(model, 1, SimulatedCopies)
    blocks = [_block(weight), _block(weight.view(2, 2))]
    vars(model)["blocks"] = blocks
    with pytest.raises(ConfigError, match="layers of this model share weights"):
        for block in blocks[:num_taken]:
            offloader.take(block)
        offloader.finish()


def test_blocks_in_any_order_find_their_weights() -> None:
    model = Module()
    offloader = Offloader(model, 1, SimulatedCopies)
    blocks = [_block(torch.full((8,), float(i))) for i in range(5)]
    vars(model)["blocks"] = blocks
    for block in blocks:
        offloader.take(block)
    offloader.finish()
    draw = random.Random(0)
    for _ in range(50):  # in any order
        number = draw.randrange(5)
        assert float(blocks[number].run_deferred()) == 8 * number


def test_on_a_cpu_groups_change_nothing_and_say_so() -> None:
    config = ServerConfig.from_kwargs(offload_group_size=2)
    config = replace(config, given=frozenset({"offload_group_size"}))
    (note,) = no_effect_notes(config, "cpu")
    assert note.startswith("--offload-group-size has no effect: it is for cuda")
    config = ServerConfig.from_kwargs(cpu_offload_gb=1)  # there of the packed file
    assert not offload.is_offloading(config)
    both = ServerConfig.from_kwargs(cpu_offload_gb=1, offload_group_size=2)
    assert any("--offload-group-size" in problem for problem in conflict_problems(both))
