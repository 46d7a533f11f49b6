"""ERNIE 4.5 VL against its class: experts of text and of images, and image boundary tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixlm.arch.hf import describe
from radixlm.arch.spec import Moe
from radixlm.base.errors import CheckpointError
from radixlm.entrypoints.offline import Engine
from radixlm.kernels.dispatch import bind
from radixlm.layers.modality_moe import ModalityMoeLayer
from radixlm.models.build import build_model
from radixlm.step.batch import MediaInputs
from radixlm.weights.load import load_weights

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from radixlm.multimodal.checkpoint import NoVideos  # noqa: E402
from tests.multimodal.compare_answers import assert_same_answers  # noqa: E402
from tests.multimodal.tiny import TEXT, Tiny, image_processor, processor, save, tokenizer  # noqa: E402

NAMES = "image_start image image_end video_start video video_end".split()
IDS = {f"{name}_token_id": 257 + i for i, name in enumerate(NAMES)}


def config(**more: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    text = {
        **TEXT, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2,
        "moe_intermediate_size": [48, 32], "moe_num_shared_experts": 1, "rope_parameters": rope,
        **more,
    }  # fmt: skip
    encoder = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 7,
    }  # fmt: skip
    return tf.Ernie4_5_VLMoeConfig(text_config=text, vision_config=encoder, **IDS)


def tiny(**more: Any) -> Tiny:
    tok = tokenizer(**{f"{name}_token": f"<|{name}|>" for name in NAMES})
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    reader = image_processor("Ernie4_5_VLMoe", patch_size=7, merge_size=2, size=size)
    whole = processor(tf.Ernie4_5_VLMoeProcessor, reader, tok, video_processor=NoVideos())
    return Tiny(config(**more), whole, "<|image_start|><|image|><|image_end|>")


def corrected(model: Any, folder: Path) -> None:
    """Random corrections and biases, in the model and in the folder."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
    model.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_answers_with_images_equal_the_class(tmp_path: Path) -> None:
    made = tiny()
    model = save(made, tmp_path)
    corrected(model, tmp_path)
    assert_same_answers(made, model, tmp_path)


BIASED = {"use_bias": True, "moe_num_shared_experts": 0, "mlp_layer_types": ["sparse", "dense"] * 2}


@pytest.mark.parametrize("more", [{}, {**BIASED, "num_hidden_layers": 4}])
@pytest.mark.filterwarnings("ignore")
def test_answers_to_texts_equal_the_class(more: dict[str, Any], tmp_path: Path) -> None:
    made = tiny(**more)
    model = save(made, tmp_path)
    corrected(model, tmp_path)
    ids = torch.randint(1, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 40:].tolist()
    engine = Engine(model_path=str(tmp_path), dtype="float32", max_total_tokens=512)
    try:
        found = engine.generate(
            input_ids=ids[0].tolist(),
            sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
        )
    finally:
        engine.shutdown()
    assert found["output_ids"] == wanted


def test_each_token_uses_the_experts_of_its_modality(tmp_path: Path) -> None:
    """Against the two mixtures of the class, called separately; also if a graph runs both."""
    model = save(tiny(), tmp_path)
    corrected(model, tmp_path)
    ours = build_model(describe(tmp_path), torch.device("cpu"), torch.float32, bind("cpu"))
    load_weights(ours, tmp_path, progress=False)
    layer = ours.blocks[1].ffn
    assert isinstance(layer, ModalityMoeLayer)
    theirs = model.model.language_model.layers[1].mlp
    x_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    ids_T = torch.tensor([5, 257, 0, 0, 259, 7, 260, 262, 256])
    media_T = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0]).bool()
    for held in (media_T, None, torch.ones(9).bool()):
        is_seen_T = (ids_T >= 257) if held is None else (ids_T >= 257) | held
        with torch.no_grad():
            want_TD = theirs(x_TD[None], is_seen_T[None].int())[0][0]
        batch: Any = SimpleNamespace(
            token_ids_T=ids_T, media=MediaInputs(mask_T=held), is_decode=False
        )
        torch.testing.assert_close(layer.run(x_TD, None, batch), want_TD, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            layer.run_both(x_TD, is_seen_T), want_TD, atol=1e-5, rtol=1e-5
        )  # fmt: skip


def test_a_config_names_both_kinds_of_experts() -> None:
    raw = {**json.loads(config().to_json_string()), "architectures": [
        "Ernie4_5_VLMoeForConditionalGeneration"]}  # fmt: skip
    dense, sparse, _ = (block.ffn for block in describe(raw).blocks)
    assert not isinstance(dense, Moe)
    assert isinstance(sparse, Moe)
    assert sparse.vision is not None
    assert (sparse.inner, sparse.vision.inner) == (48, 32)
    assert set(sparse.marks) == set(IDS.values())
    for wrong in ([3, 2, 3], [4, 4, 0]):
        text = raw["text_config"]
        rope = {**text["rope_parameters"], "mrope_section": wrong}
        with pytest.raises(CheckpointError, match="mrope_section"):
            describe({**raw, "text_config": {**text, "rope_parameters": rope}})
