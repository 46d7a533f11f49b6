"""Medusa heads and MLP speculators in the engine: they draft what plain torch code drafts, in each
published layout, and change no token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from radixlm.base.errors import ConfigError
from radixlm.speculative.device.heads_drafter import HeadsDrafter
from tests.engine.drafted_engine import Proposal, note_proposals, small_options
from tests.engine.test_draft_models import generate, rounds  # noqa: F401  (a fixture)
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny, reference_model

TARGET, DIM, HEADS, LAYERS, INNER = "Qwen3ForCausalLM", 64, 3, 2, 48
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
VLLM_LAYOUTS = ("vllm", "mapped", "original")
MAP = [4 * n + 3 for n in range(90)][::-1]
MLP = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": DIM,
    "inner_dim": INNER,
    "vocab_size": VOCAB,
    "n_predict": HEADS,
}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    return note_proposals(monkeypatch, HeadsDrafter)


def make_heads(folder: Path, layout: str) -> dict[str, Tensor]:
    """Heads of the authors' layout, and their files in ``layout``."""
    generator, w = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for head in range(HEADS):
        for layer in range(LAYERS):
            w[f"{head}.{layer}.linear.weight"] = torch.randn(DIM, DIM, generator=generator) * 0.15
            if layout not in VLLM_LAYOUTS:
                w[f"{head}.{layer}.linear.bias"] = torch.randn(DIM, generator=generator) * 0.15
        if layout not in ("shared", "original"):
            num = len(MAP) if layout == "mapped" else VOCAB
            w[f"{head}.{LAYERS}.weight"] = torch.randn(num, DIM, generator=generator)
    if layout in ("mapped", "original"):
        w["token_map"] = torch.tensor(MAP)
    cut = {"truncated_vocab_size": len(MAP), "original_lm_head": layout == "original"}
    config = VLLM | (cut if "token_map" in w else {}) if layout in VLLM_LAYOUTS else AUTHORS
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "authors":
        torch.save(w, folder / "medusa_lm_head.pt")
    elif layout == "shared":
        save_file(w, folder / "medusa_lm_head.safetensors")
    else:
        save_file({vllm_name(name): w[name] for name in w}, folder / "model.safetensors")
    return w


def vllm_name(name: str) -> str:
    if name == "token_map":
        return name
    head, layer, *_ = name.split(".")
    if layer == str(LAYERS):
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{layer}.weight"


def drafts(w: dict[str, Tensor], hidden_D: Tensor, last: int, lm_head: Tensor) -> list[int]:
    tokens, targets = [], w.get("token_map", torch.arange(VOCAB))
    for head in range(HEADS):
        x = hidden_D
        for layer in range(LAYERS):
            at = f"{head}.{layer}.linear."
            x = x + F.silu(F.linear(x, w[at + "weight"], w.get(at + "bias")))
        logits = w.get(f"{head}.{LAYERS}.weight", lm_head[targets]) @ x
        tokens.append(int(targets[logits.argmax()]))
    return tokens


def make_mlp(folder: Path, is_tied: bool) -> dict[str, Tensor]:
    """An MLP speculator; what its modules share is stored once."""
    generator, w = torch.Generator().manual_seed(6), dict[str, Tensor]()
    for i in range(HEADS):
        shapes = {
            "emb": (VOCAB, INNER),
            "head": (VOCAB, INNER),
            "proj": (INNER, INNER if i else DIM),
        }
        own = {part: i == 0 or not is_tied or (part, i) == ("proj", 1) for part in ("ln", *shapes)}
        for part, shape in shapes.items():
            if own[part]:
                w[f"{part}.{i}.weight"] = torch.randn(shape, generator=generator)
        if own["ln"]:
            w |= {f"ln.{i}.{n}": torch.rand(INNER, generator=generator) for n in ("weight", "bias")}
    config = MLP | {"tie_weights": is_tied, "scale_input": is_tied}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"speculator.{name}": one for name, one in w.items()}, folder / "model.safetensors")
    return w | {"is_tied": torch.tensor(is_tied)}


def mlp_drafts(w: dict[str, Tensor], hidden_D: Tensor, last: int, lm_head: Tensor) -> list[int]:
    tokens, state, is_tied = [], hidden_D, bool(w["is_tied"])
    if is_tied:  # then the input is scaled
        state = F.rms_norm(state, state.shape, eps=1e-6) / 2**0.5
    state_weight = 0.5 ** (0.5 / HEADS)
    token_weight = math.sqrt((1 - state_weight**2) * (INNER / 2))
    for i in range(HEADS):
        at = min(i, 1) if is_tied else i
        first = 0 if is_tied else i
        state = w[f"proj.{at}.weight"] @ state
        state = state + token_weight / state_weight * w[f"emb.{first}.weight"][last]
        normed = F.rms_norm(state, state.shape, eps=1e-6)
        state = F.gelu(w[f"ln.{first}.weight"] * normed + w[f"ln.{first}.bias"])
        last = int((w[f"head.{first}.weight"] @ state).argmax())
        tokens.append(last)
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


Drafts = Callable[[dict[str, Tensor], Tensor, int, Tensor], list[int]]


def made(layout: str, folder: Path) -> tuple[dict[str, Tensor], Drafts, dict[str, Any]]:
    """The weights of heads, what they draft, and the options of an engine."""
    if not layout.startswith("MLP"):
        return make_heads(folder, layout), drafts, options(folder)
    algorithm = {"speculative_algorithm": "MLP_SPECULATOR"}
    return make_mlp(folder, layout == "MLP tied"), mlp_drafts, options(folder) | algorithm


@pytest.mark.parametrize(
    "layout", ["authors", "vllm", "shared", "mapped", "original", "MLP", "MLP tied"]
)
def test_heads_draft_what_plain_code_drafts(
    layout: str,
    plain: list[list[int]],
    tmp_path: Path,
    proposals: list[Proposal],
    rounds: list[tuple[int, int]],  # noqa: F811
) -> None:
    w, drafts_of, asked = made(layout, tmp_path)
    assert generate(PROMPTS, **asked) == plain
    assert max(drafted for drafted, _ in rounds) == HEADS
    model, texts = reference_model(cached_tiny(TARGET)), []
    for text in (prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)):
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        texts.append((text, states[-1][0]))
    assert len(proposals) > 20
    for at, token, drafted in proposals:
        known = [hidden[at - 1] for text, hidden in texts if at < len(text) and text[at] == token]
        head = model.lm_head.weight
        expected = [drafts_of(w, hidden, token, head)[: len(drafted)] for hidden in known]
        assert drafted[:HEADS] in expected


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
    (tmp_path / "config.json").write_text(json.dumps(VLLM | {"truncated_vocab_size": 90}))
    with pytest.raises(ConfigError, match=r"90 tokens .*no tensor 'token_map'"):
        generate(PROMPTS, **options(tmp_path))
    make_mlp(tmp_path, is_tied=False)
    with pytest.raises(ConfigError, match=r"MEDUSA: .* of kind MLP_SPECULATOR; MLP_SPECULATOR"):
        generate(PROMPTS, **options(tmp_path))
    asked = options(tmp_path) | {"speculative_algorithm": "MLP_SPECULATOR"}
    (tmp_path / "config.json").write_text(json.dumps(MLP | {"emb_dim": 32}))
    with pytest.raises(ConfigError, match="hidden states of 32 channels, Qwen3ForCausalLM has 64"):
        generate(PROMPTS, **asked)
    (tmp_path / "config.json").write_text(json.dumps(MLP | {"n_predict": 5}))
    with pytest.raises(ConfigError, match=r"has 3 heads, .* says 5; 'n_predict': 3 works"):
        generate(PROMPTS, **asked)
