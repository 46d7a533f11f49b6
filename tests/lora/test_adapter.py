"""Adapters are placed exactly: what is added to each layer makes it the layer of a checkpoint with
the adapter merged by the paper's formula."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.layers.linear import Linear
from radixlm.lora.adapter import Adapter, LoraLimits, read_adapter
from radixlm.lora.inspect import inspect, targets_of
from radixlm.lora.targets import AdapterTargets
from tests.fakes.lora_adapters import merged, write_adapter, write_folder
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny

LLAMA = "LlamaForCausalLM"


def with_adapter(base: Path, adapter: Adapter) -> dict[str, Tensor]:
    """The weights of a model's layers with the adapter added."""
    weights = {}
    for path, layer in AdapterTargets(load_model(base)).sites.items():
        assert isinstance(layer, Linear)
        weight = layer.packed.unpack().double()
        for part in adapter.parts.get(path, ()):
            delta = part.scale * (part.b_OR.double() @ part.a_RI.double())
            weight[part.first : part.first + len(delta)] += delta
        weights[path] = weight
    return weights


def assert_as_merged(
    base: Path, folder: Path, tmp_path: Path, scale: float | Callable[[str], float] = 2.0
) -> Adapter:
    adapter = read_adapter(folder, targets_of(base))
    wanted = AdapterTargets(load_model(merged(base, folder, tmp_path / "merged", scale))).sites
    for path, weight in with_adapter(base, adapter).items():
        torch.testing.assert_close(weight.float(), wanted[path].packed.unpack().float())
    return adapter


@pytest.mark.parametrize(
    "arch",
    [
        LLAMA, "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM",
        "GPT2LMHeadModel", "GPTNeoXForCausalLM", "BloomForCausalLM", "FalconForCausalLM",
        "StableLmForCausalLM", "CohereForCausalLM", "Olmo2ForCausalLM", "OPTForCausalLM",
    ],
)  # fmt: skip
def test_every_module_of_an_architecture(arch: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    pattern = r"\.\d+\.(.*\.)?\w+$"
    adapter = assert_as_merged(base, write_adapter(base, tmp_path / "a", 3, pattern), tmp_path)
    assert set(adapter.parts) == set(targets_of(base).sites)


@pytest.mark.parametrize("rank", [1, 2, 8, 16, 64])
def test_ranks(rank: int, tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    adapter = assert_as_merged(base, write_adapter(base, tmp_path / "a", rank), tmp_path)
    assert adapter.max_rank == rank


@pytest.mark.parametrize("pattern", [r"[qv]_proj$", r"layers\.1\..*q_proj$", r"down_proj$"])
def test_some_modules(pattern: str, tmp_path: Path) -> None:
    """A part that was not trained costs nothing: it has no tensors."""
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", 4, pattern)
    adapter = assert_as_merged(base, folder, tmp_path)
    assert adapter.num_bytes == sum(t.nbytes for t in load_file(folder / _FILE).values())


def test_rank_stabilized(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", 4, use_rslora=True, lora_alpha=6)
    assert_as_merged(base, folder, tmp_path, 6 / math.sqrt(4))


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)

    def is_long(name: str) -> bool:
        return name.endswith("q_proj") or "layers.1.mlp" in name

    folder = write_adapter(
        base, tmp_path / "a", 4, rank_of=lambda name: 7 if is_long(name) else 4, lora_alpha=8,
        rank_pattern={"q_proj": 7, r"layers\.1\.mlp\..*": 7}, alpha_pattern={r".*\.v_proj": 3},
    )  # fmt: skip
    assert_as_merged(
        base, folder, tmp_path,
        lambda name: (3 if name.endswith("v_proj") else 8) / (7 if is_long(name) else 4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.", ""),
        (".weight", ".default.weight"),
    ],
)
def test_names_of_wrappers(old: str, new: str, tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a")
    plain = read_adapter(folder, targets_of(base))
    rename_tensors(folder, lambda name: name.replace(old, new, 1))
    assert read_adapter(folder, targets_of(base)).digest == plain.digest


def test_the_digest_is_of_what_counts(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    targets = targets_of(base)
    digests = [
        read_adapter(write_adapter(base, tmp_path / f"{i}", **how), targets).digest
        for i, how in enumerate(
            [{}, {"base_model_name_or_path": "other"}, {"lora_alpha": 9}, {"seed": 1}, {"rank": 5}]
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_a_pickled_file_is_read_as_tensors(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a")
    plain = read_adapter(folder, targets_of(base))
    torch.save(load_file(folder / _FILE), folder / "adapter_model.bin")
    (folder / _FILE).unlink()
    assert read_adapter(folder, targets_of(base)).digest == plain.digest


def test_a_bias_of_b(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", pattern=r"k_proj$", lora_bias=True)
    tensors = load_file(folder / _FILE)
    wanted = {}
    for name in [n for n in tensors if "lora_B" in n]:
        wanted[name] = torch.randn(len(tensors[name]))
        tensors[name.replace("weight", "bias")] = wanted[name]
    save_file(tensors, folder / _FILE)
    adapter = read_adapter(folder, targets_of(base))
    biases = [part.bias_O for parts in adapter.parts.values() for part in parts]
    assert all(torch.equal(a, b) for a, b in zip(biases, wanted.values(), strict=True))


# ---- refusals ------------------------------------------------------------------------------

_FILE = "adapter_model.safetensors"


def rename_tensors(folder: Path, name_of: Callable[[str], str]) -> None:
    tensors = load_file(folder / _FILE)
    save_file({name_of(name): tensor for name, tensor in tensors.items()}, folder / _FILE)


def refusal(folder: Path, base: Path, limits: LoraLimits | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, targets_of(base), limits)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"bias": "some"}, "bias = 'some' must be 'none', 'lora_only' or 'all'"),
        ({"bias": "all", "use_dora": True}, "bias = 'all' with use_dora .* what works: 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head that it lacks"),
        ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head' must be a list of names"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes the base .* works"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices names rows that it lacks"),
        ({"trainable_token_indices": [-3]}, "trainable_token_indices = .* list of token ids"),
        ({"layer_replication": [[0, 2]]}, "layer_replication .* what works"),
        ({"use_qalora": True}, "use_qalora .* what works"),
        ({"megatron_config": {"a": 1}}, "megatron_config .* what works"),
        ({"made_up": 1}, "made_up = 1 is not known here; what works: null"),
        ({"r": 0}, "r = 0 must be a whole number from 1"),
        ({"r": 5}, "its tensors have rank 4, adapter_config.json says 5"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x' must be a number"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern: '\(' is no regular expression"),
        ({"rank_pattern": {"(?i)q": 3}}, r"'\(\?i\)q' is no regular expression: global flags"),
        ({"alora_invocation_tokens": [1 << 31]}, "alora_invocation_tokens .* list of token ids"),
    ],
)
def test_configs_that_are_refused(config: dict[str, object], words: str, tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    assert re.search(words, refusal(write_adapter(base, tmp_path / "a", **config), base))


def test_what_runs_on_cached_tokens_takes_no_adapter(tmp_path: Path) -> None:
    base = cached_tiny("DogeForCausalLM")
    folder = write_adapter(base, tmp_path / "a", pattern=r"dt_proj$")
    assert "self_attn.dt_proj" in (said := refusal(folder, base))
    assert "this layer of the model takes no adapter" in said


def test_dora_and_its_vectors_come_together(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", use_dora=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    assert "use_dora is False, its magnitude vector says other" in refusal(folder, base)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.0.self_attn.z_proj", (4, 64), "no such module .nearest: .*self_attn"),
        ("model.layers.9.self_attn.q_proj", (4, 64), "no such module"),
        ("model.layers.0.self_attn.q_proj", (4, 65), r"lora_A is \[4, 65\], the layer has 64"),
        ("model.layers.0.self_attn.q_proj", (3, 64), r"lora_A is \[3, 64\], lora_B \[64, 4\]"),
    ],
)
def test_tensors_without_a_place(
    name: str, shape: tuple[int, int], words: str, tmp_path: Path
) -> None:
    base = cached_tiny(LLAMA)
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.ones(shape),
        f"base_model.model.{name}.lora_B.weight": torch.ones(64, 4),
    }
    folder = write_folder(tmp_path, {"r": 4}, tensors)
    assert re.search(words, refusal(folder, base))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.fill_(math.nan), "holds NaN"),
        (lambda t: t.fill_(math.inf), "holds infinity"),
        (lambda t: t.to(torch.float64), "is float64; what works: bfloat16, float16, float32"),
        (lambda t: t[:, :, None], "has the shape"),
        (lambda t: t[:-1], "has 63 outputs, the module 64"),
    ],
)
def test_values_that_are_refused(
    change: Callable[[Tensor], Tensor], words: str, tmp_path: Path
) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", pattern=r"q_proj$")
    tensors = load_file(folder / _FILE)
    name = next(n for n in sorted(tensors) if "lora_B" in n)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / _FILE)
    assert re.search(words, refusal(folder, base))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("lora_B.weight", (), r"lora_B.weight has the shape \[\]"),
        ("bias", (), r"bias has the shape \[\]"),
        ("bias", (2, 64), r"bias has the shape \[2, 64\]"),
        ("token_adapter.trainable_tokens_delta", (2, 64), "are no rows of 2 tokens"),
    ],
)
def test_shapes_that_a_joined_layer_cannot_have(
    name: str, shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    """How many rows each module of GPT-2's joined q, k and v has is the adapter's to say."""
    base, module = cached_tiny("GPT2LMHeadModel"), "base_model.model.transformer.h.0.attn.c_attn"
    folder = write_adapter(base, tmp_path / "a", pattern=r"h\.1\..*c_attn$", bias="all")
    tensors = load_file(folder / _FILE)
    if "lora" in name:
        tensors[f"{module}.lora_A.weight"] = torch.ones(4, 64)
    config = json.loads((folder / "adapter_config.json").read_text())
    tokens = {"trainable_token_indices": {"c_attn": [1, 2]}} if "token" in name else {}
    tensors[f"{module}.{name}"] = torch.ones(shape)
    folder = write_folder(tmp_path / "b", config | tokens, tensors)
    assert re.search(words, refusal(folder, base))


def test_further_tensors_are_refused(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a")
    tensors = load_file(folder / _FILE)
    saved = "base_model.model.lm_head.weight"
    save_file({**tensors, saved: torch.ones(2, 2)}, folder / _FILE)
    assert saved in refusal(folder, base)
    half = next(n for n in tensors if "lora_B" in n)
    save_file({n: t for n, t in tensors.items() if n != half}, folder / _FILE)
    assert "lora_A or lora_B is missing" in refusal(folder, base)
    save_file(
        {f"base_model.model.x{i}.lora_A.weight": torch.ones(1) for i in range(999)}, folder / _FILE
    )
    assert len(refusal(folder, base)) < 500


def test_limits_of_the_server(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", 6)
    assert "rank 6 is above the limit of 4 (--max-lora-rank 6)" in refusal(
        folder, base, LoraLimits(max_rank=4)
    )
    assert "changes down_proj, gate_proj" in refusal(folder, base, LoraLimits(None, ("q_proj",)))
    read_adapter(folder, targets_of(base), LoraLimits(6, ("all",)))


def test_files_that_are_damaged(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a")
    whole = (folder / _FILE).read_bytes()
    (folder / _FILE).write_bytes(whole[:-100])
    assert "truncated" in refusal(folder, base)
    (folder / _FILE).unlink()
    assert "neither adapter_model.safetensors nor adapter_model.bin" in refusal(folder, base)
    (folder / "adapter_config.json").write_text("{")
    assert "not valid JSON" in refusal(folder, base)
    assert "or its name on a hub" in refusal(tmp_path / "nowhere", base)


def test_inspect_tells_what_an_adapter_changes(tmp_path: Path) -> None:
    base = cached_tiny(LLAMA)
    folder = write_adapter(base, tmp_path / "a", base_model_name_or_path="tiny")
    text = inspect(folder, base)
    for words in (
        "rank      4 (21 modules)",
        "scale     2",
        "down_proj",
        "every tensor has a place",
    ):
        assert words in text
    assert "not checked" in inspect(folder, None)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "some"}))
    with pytest.raises(CheckpointError, match="bias = 'some'"):
        inspect(folder, None)
