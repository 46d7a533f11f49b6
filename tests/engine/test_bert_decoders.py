"""BERT's layers as a causal language model: what is refused, and where its positions end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from tests.fakes.paged_runner import load_model
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny
from tests.models.test_pooling import engine


def test_a_roberta_reads_as_many_tokens_as_have_positions() -> None:
    """The first rows of its table belong to no place of a text."""
    folder = cached_tiny("RobertaForCausalLM", max_position_embeddings=40, pad_token_id=1)
    with engine(folder) as served:
        assert served.info.context_len == 38
        settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
        out = served.generate(input_ids=list(range(3, 33)), sampling_params=settings)
    assert len(out["output_ids"]) == 8


def test_heads_for_whole_texts_are_left_out(tmp_path: Path) -> None:
    folder = copy_tiny(cached_tiny("BertLMHeadModel"), tmp_path / "m")
    held = load_file(folder / "model.safetensors")
    for name in ("bert.pooler.dense", "cls.seq_relationship"):
        held |= {f"{name}.weight": torch.zeros(2, 64), f"{name}.bias": torch.zeros(2)}
    save_file(held, folder / "model.safetensors")
    load_model(folder)


REFUSED = [
    ("BertLMHeadModel", "is_decoder", False),
    ("RobertaForCausalLM", "add_cross_attention", True),
]


@pytest.mark.parametrize(("architecture", "key", "value"), REFUSED)
def test_an_encoder_and_cross_attention_are_refused(
    architecture: str, key: str, value: bool
) -> None:
    config = json.loads((Path(cached_tiny(architecture)) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"'{key}' = {value}"):
        describe({**config, key: value})
