"""Parts of weights: what a rank reads, and quantized models that are cut among ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.test_cut_models import prompts
from tests.fakes.cut_model import CutModel, StepRunner, logits_of
from tests.fakes.integer_checkpoint import Layout, write_integers
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny

from radixlm.distributed.topology import Topology
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.fp8 import FORMATS
from radixlm.quant.checkpoint import checkpoint_quant
from radixlm.quant.load_time import make_scheme
from radixlm.quant.param import Cut, Param
from radixlm.quant.scheme import OnlineQuantScheme, Scheme


def check_bits(folder: Path, scheme: Scheme, tp: int) -> None:
    """A model with this scheme has the same logits on several ranks."""
    whole = load_model(folder, bind("cpu", {}), scheme=scheme)
    tokens = prompts(whole.decoder.vocab)
    wanted = logits_of(StepRunner(whole, "cpu", 16), tokens)
    cut = CutModel(folder, Topology(tp=tp), shared=True, scheme=scheme)
    found = cut.prefill(tokens, backend="cpu", page_size=16, kind=StepRunner)
    assert all(torch.equal(found[s], wanted[s]) for s in tokens)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("fmt", ["int8wo", "w8a8", "w4a8-32", *FORMATS])
def test_weights_quantized_at_load(fmt: str, tp: int) -> None:
    """Blocks of 128 rows that share a scale are not divided: 256 channels have two."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    check_bits(cached_tiny("Qwen3ForCausalLM", **sizes), OnlineQuantScheme(fmt), tp)


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(
    "layout", [Layout("awq"), Layout("gptq", order=True), Layout("int8", 8, 0, sym=True)], ids=str
)
def test_checkpoints_of_integers(arch: str, layout: Layout, tmp_path: Path) -> None:
    folder, _ = write_integers(cached_tiny(arch), tmp_path, layout)
    check_bits(folder, make_scheme(None, "", checkpoint_quant(folder)), 2)


def test_parts_of_joined_matrices() -> None:
    """Rows of q, k and v, experts in any order: the loader's cut of each part is that of the
    whole."""
    whole_OI = torch.arange(40.0).view(20, 2)
    param = Param((20, 2)).cut(Cut(0, 20, ((2, 6), (9, 10), (18, 20))))
    parts = whole_OI.split((8, 4, 8))
    pieces = [
        part[begin:end]
        for part, cut in zip(parts, param.cuts_of(0, (8, 4, 8)), strict=True)
        for begin, end in cut.ranges
    ]
    assert param.shape == (7, 2) and param.whole_shape == (20, 2)
    assert torch.equal(torch.cat(pieces), param.part_of(whole_OI))
    experts = Param((4, 6, 2)).cut(Cut(0, 4, ((2, 4), (0, 1))), Cut(1, 6, ((0, 1), (3, 4))))
    stacked = torch.arange(48.0).view(4, 6, 2)
    assert torch.equal(experts.part_of(stacked), stacked[[2, 3, 0]][:, [0, 3]])
    assert experts.part_of(stacked[:3]).shape == (3, 6, 2), "another shape is left for the error"
