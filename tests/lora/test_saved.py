"""Weights that an adapter has whole (modules_to_save) and trained rows of token tables, against
checkpoints that have them in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.lora.adapter import read_adapter
from radixlm.lora.inspect import inspect, targets_of
from tests.fakes.lora_adapters import merged, write_adapter
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny, reference_model, write_tokenizer
from tests.lora.test_run import Adapted

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def changed(base: Path, names: list[str], seed: int = 0) -> dict[str, Tensor]:
    """New values of parameters of the reference model."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(reference_model(base).named_parameters())
    return {
        name: weights[name].data + torch.randn(weights[name].shape, generator=generator) * 0.1
        for name in names
    }


def with_weights(base: Path, folder: Path, new: dict[str, Tensor]) -> Path:
    """The checkpoint with these parameters; its head is no longer the token table."""
    model = reference_model(base)
    with torch.no_grad():
        head = model.lm_head.weight.clone()
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head)
        for name, value in new.items():
            model.get_parameter(name).copy_(value)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def add(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(load_file(folder / FILE) | tensors, folder / FILE)
    return folder


def assert_equal(base: Path, folder: Path, whole: Path, kernels: str) -> None:
    adapted = Adapted(base, [folder], kernels)
    got = adapted.run({0: 0, 1: -1})
    wanted = Adapted(whole, [], kernels).run({0: -1})[0]
    assert (got[0] - wanted).abs().max() < 1e-4
    assert (got[0] - got[1]).abs().max() > 1e-2
    if not kernels:
        assert torch.equal(Adapted(base, []).run({1: -1})[1], got[1])
        assert torch.equal(adapted.run({0: 0}, 3)[0], got[0])


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("LlamaForCausalLM", ["lm_head.weight"]),
        ("LlamaForCausalLM", ["lm_head.weight", "model.embed_tokens.weight"]),
        ("Gemma2ForCausalLM", ["model.embed_tokens.weight"]),
        ("LlamaForCausalLM", ["model.layers.1.mlp.gate_proj.weight"]),
        ("LlamaForCausalLM", ["model.layers.0.self_attn.o_proj.weight"]),
        ("GPTJForCausalLM", ["lm_head.weight", "lm_head.bias"]),
        ("CTRLLMHeadModel", ["transformer.w.weight"]),
        (
            "Qwen2ForCausalLM",
            [f"model.layers.{i}.self_attn.k_proj.{p}" for i in (0, 1) for p in ("weight", "bias")],
        ),
    ],
)
def test_modules_that_are_saved(arch: str, names: list[str], kernels: str, tmp_path: Path) -> None:
    """Beside plain LoRA of other modules."""
    base = cached_tiny(arch, tie_word_embeddings=False)
    new = changed(base, names)
    modules = sorted({name.split(".")[-2] for name in names})
    folder = write_adapter(base, tmp_path / "a", 3, r"(q_proj|Wq)$", modules_to_save=modules)
    whole = with_weights(merged(base, folder, tmp_path / "m"), tmp_path / "w", new)
    add(folder, {PREFIX + name: value for name, value in new.items()})
    assert_equal(base, folder, whole, kernels)
    assert "every tensor has a place" in inspect(folder, base)


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_trained_tokens(arch: str, tied: bool, kernels: str, tmp_path: Path) -> None:
    """Of a model with one table for both, the head has them too, as in PEFT."""
    base = cached_tiny(arch, tie_word_embeddings=tied)
    ids = [33, 5, 6, 101, 7]
    table, head = (changed(base, ["model.embed_tokens.weight"])["model.embed_tokens.weight"], {})
    rows, model = table[ids], reference_model(base)
    new = model.model.embed_tokens.weight.data.clone()
    new[ids] = rows
    if tied:
        head = {"lm_head.weight": new}
    given: Any = ids if kernels else {"embed_tokens": ids}
    folder = write_adapter(base, tmp_path / "a", 3, r"v_proj$", trainable_token_indices=given)
    whole = merged(base, folder, tmp_path / "m")
    whole = with_weights(whole, tmp_path / "w", {"model.embed_tokens.weight": new} | head)
    add(folder, {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": rows})
    assert_equal(base, folder, whole, kernels)


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_biases_of_layers_without_a_low_rank_part(kernels: str, tmp_path: Path) -> None:
    """PEFT trains all biases with ``bias`` all, also of modules that it does not target."""
    base = cached_tiny("Qwen2ForCausalLM", tie_word_embeddings=False)
    new = changed(base, [f"model.layers.{i}.self_attn.k_proj.bias" for i in (0, 1)])
    folder = write_adapter(base, tmp_path / "a", 3, r"q_proj$", bias="all")
    whole = with_weights(merged(base, folder, tmp_path / "m"), tmp_path / "w", new)
    add(folder, {PREFIX + name: value for name, value in new.items()})
    assert_equal(base, folder, whole, kernels)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base = cached_tiny("LlamaForCausalLM", tie_word_embeddings=False)

    def refusal(number: int, tensors: dict[str, Tensor], **config: Any) -> str:
        folder = write_adapter(base, tmp_path / f"{number}", 3, r"v_proj$", **config)
        add(folder, {PREFIX + name: value for name, value in tensors.items()})
        with pytest.raises(CheckpointError) as error:
            read_adapter(folder, targets_of(base))
        return str(error.value)

    more = {"lm_head.weight": torch.ones(VOCAB + 2, 64)}
    assert "an adapter that adds none" in refusal(0, more, modules_to_save=["lm_head"])
    assert "an adapter that adds none" in refusal(1, more)  # PEFT saves resized tables unasked
    norm = {"model.norm.weight": torch.ones(64)}
    assert "without a place in the model" in refusal(2, norm, modules_to_save=["norm"])
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 64)}
    for number, (ids, words) in enumerate(
        (([1, 2, 3], "no rows of 3 tokens"), ([1, 1], "different ids"), ([1, VOCAB], "below"))
    ):
        assert words in refusal(3 + number, rows, trainable_token_indices=ids)
