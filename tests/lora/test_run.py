"""Adapters in a step: each sequence gets the logits of a checkpoint with its adapter merged, and
the same bits alone and in any company, layer by layer and in the C++ program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.lora import LoraRows
from radixlm.lora.adapter import local_parts, read_adapter
from radixlm.lora.targets import EMBED, HEAD, AdapterTargets
from radixlm.models.build import Model
from tests.fakes.lora_adapters import merged, write_adapter, write_folder
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny, reference_model

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

    def __init__(
        self,
        base: Path,
        adapters: Sequence[Path],
        kernels: str = "",
        model: Model | None = None,
        **build: Any,
    ) -> None:
        self.kernels = bind("cpu", {"all": kernels} if kernels else None)
        self.model: Model = model or load_model(base, self.kernels, **build)
        targets = AdapterTargets(self.model)
        self.model.adapt(tuple(targets.sites.values()))
        site = {path: number for number, path in enumerate(targets.sites)}
        site |= {HEAD: self.model.head_site, EMBED: self.model.embed_site}
        self.packed = [
            self.kernels.pack_adapter(
                {
                    site[path]: parts
                    for path, parts in local_parts(read_adapter(one, targets), targets).items()
                }
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
        return {s: torch.cat(p) for s, p in parts.items() if p}  # ranks above 0 have no logits


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


@pytest.mark.parametrize(
    ("arch", "modules"),
    [
        ("AfmoeForCausalLM", "q_proj|v_proj"),
        ("BailingHybridForCausalLM", "k_proj"),
        ("KimiLinearForCausalLM", "q_proj|v_proj"),
        ("OlmoHybridForCausalLM", "q_proj|v_proj"),
        ("xLSTMForCausalLM", "k|igate_preact"),
    ],
)
def test_some_of_the_modules_that_make_a_layer(arch: str, modules: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    folder = write_adapter(base, tmp_path / "a", 3, rf"\.({modules})$", size=0.3)
    got = Adapted(base, [folder]).run({0: 0})[0]
    wanted = Adapted(merged(base, folder, tmp_path / "m"), []).run({0: -1})[0]
    assert (got - wanted).abs().max() < 1e-4
    assert (got - Adapted(base, []).run({0: -1})[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"])
def test_the_head_and_the_token_table(arch: str, tied: bool, kernels: str, tmp_path: Path) -> None:
    """Of a model with one table for both, each has its own part."""
    base = cached_tiny(arch, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(1)
    a_RV, b_DR, a_RD, b_VR = (
        torch.randn(shape, generator=generator) * 0.2
        for shape in ((4, VOCAB), (64, 4), (4, 64), (VOCAB, 4))
    )
    table, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    tensors = {
        f"{table}.lora_embedding_A": a_RV, f"{table}.lora_embedding_B": b_DR,
        f"{head}.lora_A.weight": a_RD, f"{head}.lora_B.weight": b_VR,
    }  # fmt: skip
    folder = write_folder(tmp_path / "a", {"r": 4, "lora_alpha": 6}, tensors)
    adapted = Adapted(base, [folder], kernels)
    got = adapted.run({0: 0, 1: -1})
    model = reference_model(base)
    with torch.no_grad():
        table_VD, head_VD = model.model.embed_tokens.weight.clone(), model.lm_head.weight.clone()
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head_VD + 1.5 * (b_VR @ a_RD))
        model.model.embed_tokens.weight = torch.nn.Parameter(table_VD + 1.5 * (b_DR @ a_RV).T)
    model.save_pretrained(tmp_path / "m")
    wanted = Adapted(tmp_path / "m", [], kernels).run({0: -1})[0]
    assert (got[0] - wanted).abs().max() < 1e-4
    if not kernels:
        assert torch.equal(got[1], Adapted(base, []).run({1: -1})[1])
        assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])


DORA = [
    "LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM",
    "GraniteForCausalLM", "CohereForCausalLM",
]  # fmt: skip


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("arch", DORA)
def test_dora(arch: str, kernels: str, tmp_path: Path) -> None:
    """Layers with and without biases and residual scales; base rows keep their bits."""
    base = cached_tiny(arch)
    dora = write_adapter(base, tmp_path / "a", 3, PATTERN, size=0.1, use_dora=True)
    plain = write_adapter(base, tmp_path / "b", 5, PATTERN, seed=1, size=0.1)
    adapted = Adapted(base, [dora, plain], kernels)
    got = adapted.run({0: 0, 1: -1, 2: 1})
    for sequence, folder in ((0, dora), (2, plain)):
        whole = Adapted(merged(base, folder, tmp_path / f"m{sequence}"), [], kernels)
        wanted = whole.run({sequence: -1})[sequence]
        assert (got[sequence] - wanted).abs().max() < 1e-4, sequence
    if not kernels:
        assert torch.equal(Adapted(base, []).run({1: -1})[1], got[1])
        assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("arch", ["Qwen2ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"])
def test_trained_biases(arch: str, kernels: str, tmp_path: Path) -> None:
    """They take the place of the layer's own; Phi-3 has none."""
    base, prefix = cached_tiny(arch), "base_model.model."
    folder = write_adapter(base, tmp_path / "a", 3, PATTERN, size=0.1, bias="all")
    whole = merged(base, folder, tmp_path / "m")
    tensors, weights = (
        load_file(f) for f in (folder / "adapter_model.safetensors", whole / "model.safetensors")
    )
    modules = {name.removeprefix(prefix).partition(".lora_A.")[0] for name in tensors}
    biases = [f"{one}.bias" for one in sorted(modules) if f"{one}.bias" in weights]
    for number, name in enumerate(biases):
        weights[name] = torch.linspace(-0.5, 0.3, len(weights[name])) * (1 + number % 3)
        saved = name if number % 2 else name.replace(".bias", ".base_layer.bias")
        tensors[prefix + saved] = weights[name]
    save_file(tensors, folder / "adapter_model.safetensors")
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    adapted = Adapted(base, [folder], kernels)
    got = adapted.run({0: 0, 1: -1})
    assert (got[0] - Adapted(whole, [], kernels).run({0: -1})[0]).abs().max() < 1e-4
    assert bool(biases) == (arch != "Phi3ForCausalLM")
    if biases:  # they have an effect, and need a bias
        plain = Adapted(merged(base, folder, tmp_path / "n"), [], kernels).run({0: -1})[0]
        assert (got[0] - plain).abs().max() > 1e-2
        return
    name = next(name for name in tensors if "o_proj.lora_B" in name)
    tensors[name.replace("lora_B.weight", "base_layer.bias")] = torch.ones(64)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="its bias was trained, the model's layer has none"):
        Adapted(base, [folder], kernels)
    tensors[f"{prefix}model.norm.bias"] = torch.ones(64)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="without a place in the model"):
        Adapted(base, [folder], kernels)


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
