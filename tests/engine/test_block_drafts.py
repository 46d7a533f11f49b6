"""DFlash and DSpark heads in the engine: they draft what plain torch code drafts behind the same
tokens, whatever drafts were refused before, and change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixlm.base.errors import ConfigError
from radixlm.speculative.device.block_drafter import BlockDrafter
from tests.engine.drafted_engine import Proposal, note_proposals
from tests.engine.test_draft_models import generate, rounds  # noqa: F401  (a fixture)
from tests.fakes.block_drafts import SIZE, TAPS, drafts, make_head
from tests.fakes.tiny_checkpoint import VOCAB, cached_tiny, reference_model

TARGET = "Qwen3ForCausalLM"
SHARED = [(7 * n) % 370 + 5 for n in range(20)]
PROMPTS = [SHARED + [11 * k + 5] * k for k in range(1, 4)]
LATE_MASK = {"mask_token_id": 390, "target_layer_ids": [0, 1]}
MARKOV = {"architectures": ["DSparkDraftModel"], "markov_rank": 8}
MINIMAX = MARKOV | {
    "architectures": ["DSparkMiniMaxDraftModel"], "markov_head_type": "vanilla",
    "sliding_window_non_causal": True,
}  # fmt: skip
SECOND = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "mask_token_id": 9, "target_layer_ids": [0, 1], "conv_kernel_size": 3,
        "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6,
        "input_embedding_scale": 1.5, "output_multiplier": 0.5,
    },
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "DFLASH": {},
    "DFLASH Laguna": {"architectures": ["DFlashLagunaForCausalLM"]},
    **{
        f"DSPARK {kind}": MARKOV | {"markov_head_type": kind}
        for kind in ("vanilla", "gated", "rnn")
    },
    "DSPARK of LFM 2": MARKOV
    | {"architectures": ["Lfm2DSparkDraftModel"], "markov_head_type": "vanilla"},
    "DSPARK of MiniMax": MINIMAX,
    "DSPARK of MiniMax in MXFP8": MINIMAX | {"quantization_config": {"quant_method": "mxfp8"}},
    "DFLASH 2": SECOND | {"is_causal": False},
    "DFLASH 2 of fewer tokens": SECOND | {"draft_vocab_size": 40},
    "DFLASH of fewer tokens": {"draft_vocab_size": 40, "sliding_window_non_causal": True},
    "DSPARK of fewer tokens": MARKOV | {"markov_head_type": "gated", "draft_vocab_size": 40},
}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    return note_proposals(monkeypatch, BlockDrafter)


def drafting(name: str, folder: Path) -> dict[str, Any]:
    algorithm = name.split()[0]
    count = SIZE - (algorithm == "DFLASH")
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": count,
        "speculative_draft_model_path": str(folder),
        "dtype": "float32",
    }


@pytest.mark.parametrize("name", HEADS)
def test_they_draft_what_plain_code_drafts(
    name: str,
    tmp_path: Path,
    proposals: list[Proposal],
    rounds: list[tuple[int, int]],  # noqa: F811
) -> None:
    folder = cached_tiny(TARGET)
    config, weights = make_head(tmp_path, VOCAB, **HEADS[name])
    options: dict[str, Any] = {"model_path": str(folder), "page_size": 4, "max_total_tokens": 512}
    options |= {"chunked_prefill_size": 16, "max_running_requests": 2}
    options |= {"sampling": {"temperature": 0, "max_new_tokens": 14, "ignore_eos": True}}
    plain = generate(PROMPTS, **options)
    assert generate(PROMPTS, **options, **drafting(name, tmp_path)) == plain
    model = reference_model(folder)
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    texts = []
    for text in (prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)):
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        texts.append((text, torch.cat([states[layer + 1][0] for layer in TAPS], -1)))
    assert len(proposals) > 20
    for at, token, drafted in proposals:
        made = [
            drafts(config, weights, hidden[begin:at], token, table, head)[: len(drafted)]
            for text, hidden in texts
            for begin in (0, 16)  # of a prefix whose entries were not yet written
            if at < len(text) and text[at] == token
        ]
        assert drafted in made


@pytest.mark.parametrize(
    ("algorithm", "changes", "named"),
    [
        ("DSPARK", {}, "--speculative-algorithm DSPARK: .* kind DFLASH; DFLASH works"),
        ("EAGLE", {}, "--speculative-algorithm EAGLE: .* kind DFLASH; DFLASH works"),
        ("DSPARK", MARKOV | {"markov_head_type": "gated", "vocab_size": 390}, "of 390 tokens"),
        ("DFLASH", {"vocab_size": 400, "dflash_config": LATE_MASK}, "mask is token 390, Qwen3"),
        ("DFLASH", {"hidden_size": 32}, "hidden states of 32 channels, Qwen3ForCausalLM has 64"),
    ],
)
def test_what_does_not_fit_is_refused(
    algorithm: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    make_head(tmp_path, VOCAB, **changes)
    options = drafting(algorithm, tmp_path) | {"model_path": str(cached_tiny(TARGET))}
    with pytest.raises(ConfigError, match=named):
        generate(PROMPTS, **options)


def test_a_block_is_no_tree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, proposals: list[Proposal]
) -> None:
    make_head(tmp_path, VOCAB)
    options = drafting("DFLASH", tmp_path) | {"model_path": str(cached_tiny(TARGET))}
    options |= {"speculative_eagle_topk": 4, "speculative_num_steps": None}
    options |= {"sampling": {"temperature": 0, "max_new_tokens": 4}}
    generate(PROMPTS[:1], **options)
    assert "--speculative-eagle-topk 4 is read as 1: the draft makes a block" in caplog.text
