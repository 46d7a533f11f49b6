"""BERT's layers as a causal language model: what is refused, and where its positions end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.models.test_pooling import engine


def test_a_roberta_reads_as_many_tokens_as_have_positions() -> None:
    """The first rows of its table belong to no place of a text."""
    folder = cached_tiny("RobertaForCausalLM", max_position_embeddings=40, pad_token_id=1)
    with engine(folder) as served:
        assert served.info.context_len == 38
        settings: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
        out = served.generate(input_ids=list(range(3, 33)), sampling_params=settings)
    assert len(out["output_ids"]) == 8


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
