"""Adapters in a step: each sequence gets the logits of a checkpoint with its adapter merged, and
the same bits alone and in any company, layer by layer and in the C++ program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.lora import LoraRows
from radixlm.lora.adapter import read_adapter
from radixlm.lora.targets import AdapterTargets
from radixlm.models.build import Model
from tests.fakes.lora_adapters import merged, write_adapter
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny

PROMPT = [5, 9, 33, 7, 101, 54, 3, 8, 200, 17]
ARCHITECTURES = [
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "FalconForCausalLM", "OPTForCausalLM",
    "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM",
    "Lfm2ForCausalLM", "BambaForCausalLM",
]  # fmt: skip
# kv_b is absorbed into the queries; experts are not linear layers
PATTERN = r"\.\d+\.(?!.*(experts|router|mlp\.gate$|kv_b_proj|x_proj|dt_proj|in_proj_ba))(.*\.)?\w+$"


class Adapted:
    """A model with adapters 0, 1, ..."""

    def __init__(self, base: Path, adapters: Sequence[Path], kernels: str = "") -> None:
        self.kernels = bind("cpu", {"all": kernels} if kernels else None)
        self.model: Model = load_model(base, self.kernels)
        targets = AdapterTargets(self.model)
        self.model.adapt(tuple(targets.sites.values()))
        site = {path: number for number, path in enumerate(targets.sites)}
        self.packed = [
            self.kernels.pack_adapter(
                {site[path]: parts for path, parts in read_adapter(one, targets).parts.items()}
            )
            for one in adapters
        ]

    def rows(self, counts: dict[int, int], owners: dict[int, int]) -> LoraRows:
        """Of sequences with so many tokens, each with an adapter or -1."""
        of = [owners[s] for s, count in counts.items() for _ in range(count)]
        return self.kernels.lora_rows(self.packed, torch.tensor(of, dtype=torch.int32))

    def run(self, owners: dict[int, int], num_chunks: int = 1) -> dict[int, Tensor]:
        """Logits of the prompt of each sequence and of two tokens after it."""
        backend = "torch_native" if self.kernels.chosen["rms_norm"] == "reference" else "cpu"
        runner = PagedRunner(self.model, backend, 16)
        parts: dict[int, list[Tensor]] = {s: [] for s in owners}
        step = -(-len(PROMPT) // num_chunks)
        fed = [PROMPT[i : i + step] for i in range(0, len(PROMPT), step)] + [[4], [6]]
        for tokens in fed:
            new = {s: [t + s % 3 for t in tokens] for s in owners}
            rows = self.rows({s: len(t) for s, t in new.items()}, owners)
            for sequence, logits in runner.step(new, lora=rows).items():
                parts[sequence].append(logits)
        return {s: torch.cat(p) for s, p in parts.items()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_are_those_of_merged_weights(arch: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    folder = write_adapter(base, tmp_path / "a", 3, PATTERN, seed=1, size=0.1)
    adapted = Adapted(base, [folder])
    got = adapted.run({0: 0, 1: -1})
    for sequence, owner in ((0, folder), (1, None)):
        checkpoint = base if owner is None else merged(base, folder, tmp_path / "m")
        plain = Adapted(checkpoint, []).run({sequence: -1})[sequence]
        assert (got[sequence] - plain).abs().max() < 1e-4, sequence
    assert (got[0] - got[1]).abs().max() > 1e-2


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3NextForCausalLM"])
def test_company_changes_no_bit(arch: str, kernels: str, tmp_path: Path) -> None:
    """Eight adapters of different ranks and modules in a batch, in chunks, and base rows."""
    base = cached_tiny(arch)
    folders = [
        write_adapter(base, tmp_path / f"{i}", 1 + 5 * i, PATTERN, seed=i, size=0.1)
        for i in range(7)
    ]
    folders.append(write_adapter(base, tmp_path / "one", 4, r"\.1\..*(q_proj|c_attn|out_proj)$"))
    adapted = Adapted(base, folders, kernels)
    owners = {s: s - 1 for s in range(9)} | {9: -1, 10: 3}
    together = adapted.run(owners)
    if kernels:  # torch's products depend on their sizes
        for sequence, owner in owners.items():
            alone = adapted.run({sequence: owner})[sequence]
            torch.testing.assert_close(alone, together[sequence], rtol=1e-4, atol=1e-4)
        return
    for sequence, owner in owners.items():
        assert torch.equal(adapted.run({sequence: owner}, 3)[sequence], together[sequence])
    plain = Adapted(base, [])
    assert torch.equal(plain.run({0: -1})[0], together[0])
    plain.model.use_program = False
    if arch != "Qwen3NextForCausalLM":  # whose states advance in other kernels there
        assert torch.equal(plain.run({0: -1})[0], together[0])


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_step_of_the_program_equals_its_layers(arch: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    adapted = Adapted(base, [write_adapter(base, tmp_path / "a", 5, PATTERN)])
    program = adapted.run({0: 0, 1: -1})
    assert adapted.model.program is not None
    adapted.model.use_program, adapted.model.program = False, None
    layers = adapted.run({0: 0, 1: -1})
    torch.testing.assert_close(program[0], layers[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(program[1], layers[1])
