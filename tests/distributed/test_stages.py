"""A model divided into pipeline stages has the bits of the whole one."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tests.distributed.test_cut_models import prompts
from tests.fakes.cut_model import CutModel, logits_of
from tests.fakes.mechanisms import each_mechanism
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny

from radixlm.base.errors import ConfigError
from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import bind
from radixlm.models.build import is_transformers
from radixlm.models.decoder import DecoderModel
from radixlm.models.stages import possible_cuts, split_layers


def check_stages(arch: str, topology: Topology, with_program: bool) -> None:
    folder = cached_tiny(arch)
    whole = load_model(folder, bind("cpu", {}))
    if not isinstance(whole, DecoderModel):
        pytest.skip("an encoder has one stage")
    if len(possible_cuts(whole.decoder)) < topology.pp - 1:
        with pytest.raises(ConfigError, match="--pp-size"):
            CutModel(folder, topology)
        return
    whole.use_program = with_program
    tokens = prompts(whole.decoder.vocab)
    wanted = logits_of(PagedRunner(whole, "cpu", 16), tokens)
    cut = CutModel(folder, topology)
    for model in cut.models:
        assert not is_transformers(model) and isinstance(model, DecoderModel)
        model.use_program = with_program
        held = sum(len(group.layers) for group in model.kv_groups)
        assert held <= sum(len(group.layers) for group in whole.kv_groups)
    found = cut.prefill(tokens, backend="cpu", page_size=16)
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)


@pytest.mark.parametrize("arch", each_mechanism(ARCHITECTURES))
def test_bits_equal_the_whole_model(arch: str) -> None:
    """Prompts in chunks and decoding tokens in two stages, layer by layer and by the program."""
    for with_program in (False, True):
        check_stages(arch, Topology(pp=2), with_program)


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"])
def test_stages_of_several_ranks(arch: str) -> None:
    check_stages(arch, Topology(tp=2, pp=2), with_program=False)


def test_stages_are_split_by_cost() -> None:
    layers = [1.0] * 8
    assert split_layers([*layers, 0.0], range(1, 8), 2) == [0, 4, 8]
    assert split_layers([*layers, 2.0], range(1, 8), 2) == [0, 5, 8]  # the head counts
    assert split_layers([*layers, 0.0], [3, 7], 2) == [0, 3, 8]  # where it may be cut
    generator = random.Random(0)
    for _ in range(50):
        costs = [generator.randint(1, 9) for _ in range(generator.randint(4, 8))] + [3]
        count = len(costs) - 1
        for stages in (1, 2, 3, 4):
            best = min(
                max(
                    sum(costs[a:b]) + (costs[-1] if b == count else 0)
                    for a, b in itertools.pairwise((0, *cuts, count))
                )
                for cuts in itertools.combinations(range(1, count), stages - 1)
            )
            bounds = split_layers(costs, range(1, count), stages)
            ends = itertools.pairwise(bounds)
            assert best == max(sum(costs[a : b if b < count else None]) for a, b in ends)


def test_the_layers_of_stages_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_tiny("LlamaForCausalLM")
    count = len(load_model(folder).decoder.blocks)
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", f"1,{count - 1}")
    models = CutModel(folder, Topology(pp=2)).models
    stages = [(m.stage.first, m.stage.end) for m in models if isinstance(m, DecoderModel)]
    assert stages == [(0, 1), (1, count)]
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", f"1,{count}")
    with pytest.raises(ConfigError, match=f"{count} together, such as"):
        CutModel(folder, Topology(pp=2))


def test_more_stages_than_layers_are_refused() -> None:
    folder = cached_tiny("LlamaForCausalLM")
    count = len(load_model(folder).decoder.blocks)
    with pytest.raises(ConfigError, match=f"at most {count} stages; use --pp-size {count}"):
        CutModel(folder, Topology(pp=count + 1))
