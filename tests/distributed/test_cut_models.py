"""A model cut among ranks has the bits of the whole one."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from tests.fakes.cut_model import CutModel, StepRunner, logits_of
from tests.fakes.mechanisms import REPRESENTATIVES, each_mechanism
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.thread_groups import thread_groups
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny
from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.distributed.topology import Topology
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import bind
from radixlm.layers.placement import ALL_HEADS, cut_heads

LENGTHS = (19, 7, 12)
# why: docs/design/cpu-kernels.md
LAYER_BY_LAYER = {
    *("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DogeForCausalLM"),
    *("Dots3NoteForCausalLM", "Glm5NextForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"),
    *("InklingForCausalLM", "JetMoeForCausalLM", "MiniMaxM3VLForCausalLM", "RwkvForCausalLM"),
    *("MistralLarge4ForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM"),
    *("MuseSparkForConditionalGeneration", "Qwen4ExpForCausalLM", "ZayaForCausalLM"),
    *("Qwen4ExpForConditionalGeneration", "xLSTMForCausalLM"),
}


def prompts(vocab: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(0)
    return {
        i: torch.randint(3, vocab, (n,), generator=generator).tolist()
        for i, n in enumerate(LENGTHS)
    }


@lru_cache(maxsize=1)
def whole_model(arch: str) -> tuple[dict[int, list[int]], dict[int, Tensor]]:
    """Prompts, and their logits layer by layer on one rank."""
    whole = load_model(cached_tiny(arch), bind("cpu", {}))
    whole.use_program = False
    tokens = prompts(whole.decoder.vocab)
    return tokens, logits_of(PagedRunner(whole, "cpu", 16), tokens)


# step programs, below, cut most models in two; three ranks cut unevenly, which is more
CUTS = [
    pytest.param(arch, tp, marks=() if tp == 3 and arch in REPRESENTATIVES else pytest.mark.slow)
    for arch in ARCHITECTURES
    for tp in (2, 3)
]


@pytest.mark.parametrize(("arch", "tp"), CUTS)
def test_bits_equal_the_whole_model(arch: str, tp: int) -> None:
    """Prompts in chunks and decoding tokens, on two and (unevenly) on three ranks."""
    tokens, wanted = whole_model(arch)
    cut = CutModel(cached_tiny(arch), Topology(tp=tp))
    found = cut.prefill(tokens, backend="cpu", page_size=16)
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)


@pytest.mark.parametrize("arch", each_mechanism(ARCHITECTURES))
def test_bits_of_step_programs(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of C++ step programs, which gather in shared memory and divide what ranks would
    repeat."""
    monkeypatch.setattr(native().Program, "together_from", 1)
    folder = cached_tiny(arch)
    whole = load_model(folder, bind("cpu", {}))
    tokens = prompts(whole.decoder.vocab)
    wanted = logits_of(StepRunner(whole, "cpu", 16), tokens)
    assert (whole.program is None) == (arch in LAYER_BY_LAYER)
    if whole.program is None:
        return
    cut = CutModel(folder, Topology(tp=2), shared=True)
    found = cut.prefill(tokens, backend="cpu", page_size=16, kind=StepRunner)
    assert all(model.program is not None for model in cut.models)
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)


def test_more_ranks_than_heads_are_refused() -> None:
    """The message names the number that works."""
    folder = cached_tiny("LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"5 ranks .* 4 attention heads; 4 ranks can"):
        CutModel(folder, Topology(tp=5))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "cut", "kv"),
    [
        (8, 4, 2, (0, 4, 8), [(0, 2), (2, 4)]),
        (14, 7, 2, (0, 8, 14), [(0, 4), (4, 7)]),
        (8, 2, 4, (0, 2, 4, 6, 8), [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (14, 2, 3, (0, 4, 7, 14), [(0, 1), (0, 1), (1, 2)]),
        (4, 1, 3, (0, 2, 3, 4), [(0, 1)] * 3),
    ],
)
def test_heads_are_cut_with_their_keys(
    heads: int, kv_heads: int, ranks: int, cut: tuple[int, ...], kv: list[tuple[int, int]]
) -> None:
    """Whole KV heads where there are enough, else copies of one."""
    found = [cut_heads(heads, kv_heads, group) for group in thread_groups(ranks)]
    assert [one.heads for one in found] == [cut] * ranks
    assert [one.kv for one in found] == kv
    assert cut_heads(kv_heads, kv_heads, thread_groups(kv_heads + 1)[0]) is ALL_HEADS
