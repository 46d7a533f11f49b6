"""Adapters of a model that is cut among ranks: the bits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixlm.base.errors import CheckpointError
from radixlm.distributed.topology import Topology
from radixlm.lora.adapter import local_parts, read_adapter
from radixlm.lora.targets import EMBED, HEAD, AdapterTargets
from tests.fakes.cut_model import CutModel, run_ranks
from tests.fakes.lora_adapters import write_adapter, write_folder
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny
from tests.lora.test_run import PATTERN, Adapted

LATENT = r"kv_b_proj$|q_b_proj$|o_proj$"


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    ("arch", "pattern"),
    [
        ("LlamaForCausalLM", PATTERN), ("Qwen2ForCausalLM", PATTERN), ("Phi3ForCausalLM", PATTERN),
        ("Qwen3NextForCausalLM", PATTERN), ("DeepseekV3ForCausalLM", LATENT),
    ],
)  # fmt: skip
def test_ranks_give_the_bits_of_one(arch: str, pattern: str, tp: int, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    folders = [
        write_adapter(base, tmp_path / f"{i}", 2 + 3 * i, pattern, seed=i, size=0.1)
        for i in range(2)
    ]
    owners = {0: 0, 1: -1, 2: 1}
    alone = Adapted(base, folders)
    alone.model.use_program = False  # which adds to the residual in another order
    wanted = alone.run(owners)
    cut = CutModel(base, Topology(tp=tp))
    ranks = [Adapted(base, folders, model=model) for model in cut.models]
    got = run_ranks([lambda r=r: r.run(owners) for r in ranks], cut.ranks)[0]
    for sequence in owners:
        assert torch.equal(got[sequence], wanted[sequence]), sequence


def test_what_is_not_cut_is_refused(tmp_path: Path) -> None:
    base = cached_tiny("LlamaForCausalLM", tie_word_embeddings=False)
    targets = AdapterTargets(CutModel(base, Topology(tp=2)).models[1])
    head = "base_model.model.lm_head.lora_"
    tensors = {f"{head}A.weight": torch.ones(4, 64), f"{head}B.weight": torch.ones(VOCAB, 4)}
    folder = write_folder(tmp_path / "a", {"r": 4}, tensors)
    with pytest.raises(CheckpointError, match="this layer of the model takes no adapter"):
        read_adapter(folder, targets)
    dora = write_adapter(base, tmp_path / "b", use_dora=True)
    with pytest.raises(CheckpointError, match="with --tp-size above 1 are not supported"):
        read_adapter(dora, targets)
    whole = read_adapter(write_adapter(base, tmp_path / "c"), targets)
    assert not {HEAD, EMBED} & set(local_parts(whole, targets))
    other = AdapterTargets(CutModel(base, Topology(tp=2)).models[0])
    assert read_adapter(tmp_path / "c", other).digest == whole.digest
