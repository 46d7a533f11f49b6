"""Settings of the language models inside multimodal checkpoints, against Hugging Face, by text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.paged_runner import PagedRunner, load_model
from tests.models.test_decoder import relative_error

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from tests.multimodal.tiny import Tiny, gemma3, save
from tests.multimodal.tiny_audio import audio_flamingo, qwen2_audio, voxtral
from tests.multimodal.tiny_more import paddleocr_vl
from tests.multimodal.tiny_newer import cosmos3_edge, hyperclovax_vision_v2
from tests.multimodal.tiny_vision import molmo2

# changes of the whole config and of its text config
CASES: list[tuple[Callable[[], Tiny], dict[str, Any], dict[str, Any]]] = [
    (gemma3, {}, {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0}),
    (molmo2, {"tie_word_embeddings": True}, {}),
    (cosmos3_edge, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    (paddleocr_vl, {}, {"use_bias": True}),
    (hyperclovax_vision_v2, {"tie_word_embeddings": False}, {}),
    (qwen2_audio, {}, {"tie_word_embeddings": True}),
    (voxtral, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    (audio_flamingo, {}, {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("make", "whole", "text"), CASES)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_settings_are_as_hugging_face(
    make: Callable[[], Tiny], whole: dict[str, Any], text: dict[str, Any], tmp_path: Path
) -> None:
    tiny = make()
    for config, changes in ((tiny.config, whole), (tiny.config.text_config, text)):
        for key, value in changes.items():
            setattr(config, key, value)
    model = save(tiny, tmp_path)
    ids = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0].float()
    ours = PagedRunner(load_model(tmp_path)).prefill({0: ids}, num_chunks=2)[0]
    assert relative_error(ours, theirs) < 1e-4
