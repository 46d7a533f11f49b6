"""Drafts that are made in one step: P-EAGLE heads draft what plain torch code drafts behind the
same tokens, PARD models what their class gives for masks, and neither changes a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from radixlm.base.errors import CheckpointError, ConfigError
from radixlm.speculative.device.parallel_drafter import ParallelDrafter
from tests.engine.drafted_engine import Proposal, note_proposals, small_options
from tests.engine.test_draft_models import generate, rounds  # noqa: F401  (a fixture)
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny, reference_model
from tests.models.reference_math import Weights, checkpoint
from tests.models.test_drafts import DIM, EAGLE3, EAGLE3_SHAPES, SMALL, VOCAB, eagle3_reference

TARGET = "Qwen3ForCausalLM"
PROMPTS = [[(7 * n + 13 * k) % 370 + 5 for n in range(21 + k)] for k in range(3)]
MASK, STEPS, TAPS = 9, 4, (-1, 0, 1)
PEAGLE: dict[str, Any] = {
    **EAGLE3,
    "architectures": ["PEagleDraftModel"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
    "mask_token_id": MASK,
}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    return note_proposals(monkeypatch, ParallelDrafter)


def make_head(folder: Path, **changes: Any) -> Weights:
    """A P-EAGLE head with a token table of its own."""
    shapes = {**EAGLE3_SHAPES, "mask_hidden": (1, 1, 3 * DIM), "embed_tokens.weight": (VOCAB, DIM)}
    w = checkpoint(folder, PEAGLE | changes, shapes)
    targets = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:SMALL]
    stored = w | {"d2t": targets - torch.arange(SMALL), "t2d": torch.ones(VOCAB).bool()}
    save_file(stored, folder / "model.safetensors")
    return w | {"targets": targets}


def head_drafts(w: Weights, text: list[int], taps_TN: Tensor) -> list[int]:
    """Behind a text, whose last token has no hidden states yet."""
    masks = [MASK] * (STEPS - 1)
    rows = torch.cat((taps_TN, w["mask_hidden"].view(1, -1).expand(len(masks), -1)))
    embeds = w["embed_tokens.weight"][torch.tensor(text[1:] + masks)]
    logits, _ = eagle3_reference(w, embeds, rows, False, blanks=1)  # the place of token 0
    return w["targets"][logits[-STEPS:].argmax(-1)].tolist()


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        **small_options(TARGET),
        "dtype": "float32",
        "speculative_num_steps": STEPS,
        "speculative_draft_model_path": str(folder),
        **more,
    }


def plain_answers() -> list[list[int]]:
    asked = options(Path("none"))
    return generate(PROMPTS, **{k: v for k, v in asked.items() if "speculative" not in k})


@pytest.mark.usefixtures("rounds")
def test_a_peagle_head_drafts_what_plain_code_drafts(
    tmp_path: Path, proposals: list[Proposal]
) -> None:
    w, plain = make_head(tmp_path), plain_answers()
    assert generate(PROMPTS, **options(tmp_path, speculative_algorithm="EAGLE3")) == plain
    model, texts = reference_model(cached_tiny(TARGET)), []
    for text in (prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)):
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        texts.append((text, torch.cat([states[layer + 1][0] for layer in TAPS], -1)))
    assert len(proposals) > 20
    for at, token, drafted in proposals:
        known = [one for one in texts if at < len(one[0]) and one[0][at] == token]
        made = [head_drafts(w, text[: at + 1], taps[:at])[: len(drafted)] for text, taps in known]
        assert drafted in made


@pytest.mark.usefixtures("rounds")
def test_a_pard_model_drafts_behind_masks(tmp_path: Path, proposals: list[Proposal]) -> None:
    draft = copy_tiny(cached_tiny("LlamaForCausalLM"), tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "pard_token": MASK}))
    plain, model = plain_answers(), reference_model(draft)
    assert generate(PROMPTS, **options(draft, speculative_algorithm="STANDALONE")) == plain
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    assert len(proposals) > 20
    for at, token, drafted in proposals:
        known = [one[: at + 1] for one in texts if at < len(one) and one[at] == token]
        with torch.inference_mode():
            rows = [
                model(torch.tensor([one + [MASK] * (STEPS - 1)])).logits[0, at:] for one in known
            ]
        assert drafted in [row.argmax(-1)[: len(drafted)].tolist() for row in rows]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    make_head(tmp_path)
    stored = EAGLE3_SHAPES | {"embed_tokens.weight": (VOCAB, DIM), "d2t": (SMALL,)}
    save_file({n: torch.zeros(s) for n, s in stored.items()}, tmp_path / "model.safetensors")
    asked = options(tmp_path, speculative_algorithm="EAGLE3")
    with pytest.raises(ConfigError, match="no tensor 'mask_hidden'"):
        generate(PROMPTS, **asked)
    make_head(tmp_path, mask_token_id=VOCAB)
    with pytest.raises(CheckpointError, match=f"mask_token_id.*= {VOCAB} must be a token below"):
        generate(PROMPTS, **asked)
