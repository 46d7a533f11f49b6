"""Medusa heads in the engine: they draft what plain torch code drafts, in each published layout,
and change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from radixlm.base.errors import ConfigError
from radixlm.executor.medusa_drafter import MedusaDrafter
from tests.engine.drafted_engine import Proposal, note_proposals, small_options
from tests.engine.test_draft_models import generate, rounds  # noqa: F401  (a fixture)
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny, reference_model

TARGET, DIM, HEADS, LAYERS = "Qwen3ForCausalLM", 64, 3, 2
PROMPTS = [[(7 * n + 13 * k) % 370 + 5 for n in range(21 + k)] for k in range(3)]
AUTHORS = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "x"}
VLLM = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": DIM,
    "vocab_size": VOCAB,
    "num_heads": HEADS,
    "num_hidden_layers": LAYERS,
}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    return note_proposals(monkeypatch, MedusaDrafter)


def make_heads(folder: Path, layout: str) -> dict[str, Tensor]:
    """Heads of the authors' layout, and their files in ``layout``."""
    generator, w = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for head in range(HEADS):
        for layer in range(LAYERS):
            w[f"{head}.{layer}.linear.weight"] = torch.randn(DIM, DIM, generator=generator) * 0.15
            if layout != "vllm":
                w[f"{head}.{layer}.linear.bias"] = torch.randn(DIM, generator=generator) * 0.15
        if layout != "shared":
            w[f"{head}.{LAYERS}.weight"] = torch.randn(VOCAB, DIM, generator=generator)
    (folder / "config.json").write_text(json.dumps(VLLM if layout == "vllm" else AUTHORS))
    if layout == "authors":
        torch.save(w, folder / "medusa_lm_head.pt")
    elif layout == "shared":
        save_file(w, folder / "medusa_lm_head.safetensors")
    else:
        save_file({vllm_name(name): w[name] for name in w}, folder / "model.safetensors")
    return w


def vllm_name(name: str) -> str:
    head, layer, *_ = name.split(".")
    if layer == str(LAYERS):
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{layer}.weight"


def drafts(w: dict[str, Tensor], hidden_D: Tensor, lm_head: Tensor) -> list[int]:
    tokens = []
    for head in range(HEADS):
        x = hidden_D
        for layer in range(LAYERS):
            at = f"{head}.{layer}.linear."
            x = x + F.silu(F.linear(x, w[at + "weight"], w.get(at + "bias")))
        tokens.append(int((w.get(f"{head}.{LAYERS}.weight", lm_head) @ x).argmax()))
    return tokens


def options(folder: Path) -> dict[str, Any]:
    return {
        **small_options(TARGET),
        "speculative_algorithm": "MEDUSA",
        "speculative_num_steps": HEADS + 1,  # for the last there is no head
        "speculative_draft_model_path": str(folder),
    }


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    asked = {k: v for k, v in options(Path("none")).items() if "speculative" not in k}
    return generate(PROMPTS, **asked)


@pytest.mark.parametrize("layout", ["authors", "vllm", "shared"])
def test_heads_draft_what_plain_code_drafts(
    layout: str,
    plain: list[list[int]],
    tmp_path: Path,
    proposals: list[Proposal],
    rounds: list[tuple[int, int]],  # noqa: F811
) -> None:
    w = make_heads(tmp_path, layout)
    assert generate(PROMPTS, **options(tmp_path)) == plain
    assert max(drafted for drafted, _ in rounds) == HEADS
    model, texts = reference_model(cached_tiny(TARGET)), []
    for text in (prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)):
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        texts.append((text, states[-1][0]))
    assert len(proposals) > 20
    for at, token, drafted in proposals:
        known = [hidden[at - 1] for text, hidden in texts if at < len(text) and text[at] == token]
        made = [drafts(w, hidden, model.lm_head.weight)[: len(drafted)] for hidden in known]
        assert drafted[:HEADS] in made


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    make_heads(tmp_path, "authors")
    (tmp_path / "config.json").write_text(json.dumps(AUTHORS | {"medusa_num_heads": 5}))
    with pytest.raises(ConfigError, match=r"has 3 heads, its config\.json says 5"):
        generate(PROMPTS, **options(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(VLLM | {"hidden_size": 32}))
    with pytest.raises(ConfigError, match="hidden states of 32 channels, Qwen3ForCausalLM has 64"):
        generate(PROMPTS, **options(tmp_path))
    with pytest.raises(ConfigError, match=r"EAGLE: .* a head of kind MEDUSA; MEDUSA works"):
        generate(PROMPTS, **options(tmp_path) | {"speculative_algorithm": "EAGLE"})
