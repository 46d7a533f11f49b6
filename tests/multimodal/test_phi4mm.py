"""Phi-4-multimodal with its published names, against its class in transformers. That class's image
processor needs torchvision; a small one replaces it and does not crop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.entrypoints.offline import Engine

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from radixlm.multimodal import processor as processors  # noqa: E402
from tests.multimodal.test_families import IMAGES, encoded  # noqa: E402
from tests.multimodal.tiny import SMALL, text, tokenizer  # noqa: E402

SIDE, PATCH, TOKEN = 28, 7, "<|endoftext10|>"
GRID = SIDE // PATCH // 2
# one tile and the thumbnail, a separator after each row and between them
NUM_PLACES = 2 * GRID * (GRID + 1) + 1


class Reader:
    """A processor that gives each image one tile and a copy as the thumbnail."""

    image_token = TOKEN

    def __init__(self, tok: Any) -> None:
        self.tokenizer, self.image_token_id = tok, tok.convert_tokens_to_ids(TOKEN)

    def __call__(self, text: list[str], images: Any, **options: Any) -> dict[str, Any]:
        """Arrays of the class, and the token ids with all image tokens."""
        whole = text[0].replace(TOKEN, TOKEN * NUM_PLACES)
        made = self.tokenizer([whole], return_tensors="np")
        if images is None:
            return {"input_ids": made["input_ids"]}
        tiles = [np.asarray(image.resize((SIDE, SIDE)), np.float32) / 255 - 0.5 for image in images]
        pixels = np.stack([np.stack([tile.transpose(2, 0, 1)] * 2) for tile in tiles])
        return {
            "input_ids": made["input_ids"],
            "image_pixel_values": pixels,
            "image_sizes": np.full((len(images), 2), SIDE, np.int64),
            "image_attention_mask": np.ones((len(images), 2, SIDE // PATCH, SIDE // PATCH), "f4"),
        }


def saved(folder: Path) -> tuple[Any, Any]:
    """The class's model, and its checkpoint as published: names, adapters, encoder config with
    sizes only."""
    tok = tokenizer(TOKEN, "<|endoftext11|>")
    encoder = {**SMALL, "crop_size": SIDE, "image_token_id": tok.convert_tokens_to_ids(TOKEN)}
    audio_config = {
        "hidden_size": 16, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "nemo_conv_channels": 4, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16,
        "audio_token_id": tok.convert_tokens_to_ids("<|endoftext11|>"),
    }  # fmt: skip
    held = {**text("phi4_multimodal"), "pad_token_id": 0, "eos_token_id": 256}
    held["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 2.0, 4.0],
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    held["original_max_position_embeddings"] = 512
    held.pop("model_type")
    torch.manual_seed(0)
    config = tf.Phi4MultimodalConfig(**held, vision_config=encoder, audio_config=audio_config)
    model = tf.Phi4MultimodalForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.08)
    model.generation_config = tf.GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    tensors = {_published(k): v for k, v in load_file(folder / "model.safetensors").items()}
    tensors = {k: v for k, v in tensors.items() if "audio_embed" not in k}
    tensors["model.layers.0.mlp.down_proj.lora_A.vision.weight"] = torch.zeros(2, 96)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    raw.pop("audio_config")
    (folder / "config.json").write_text(json.dumps(raw))
    return model, tok


def _published(name: str) -> str:
    for ours, theirs in (
        ("img_projection_up", "img_projection.0"), ("img_projection_down", "img_projection.2"),
        ("global_img_feature_extensor", "glb_GN"), ("sub_img_feature_extensor", "sub_GN"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    is_linear = ".layers." in name and "_proj.weight" in name and "embed" not in name
    return name.replace("_proj.weight", "_proj.base_layer.weight") if is_linear else name


@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_published_names_equal_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tok = saved(tmp_path)
    reader = Reader(tok)
    monkeypatch.setattr(processors, "load_processor", lambda folder, on_pillow: reader)
    engine = Engine(
        model_path=str(tmp_path), dtype="float32", max_running_requests=4, max_total_tokens=2048,
        chunked_prefill_size=16,
    )  # fmt: skip
    try:
        for chosen in ([0], [2, 1]):
            text = "look " + " and ".join(TOKEN for _ in chosen) + " now tell"
            given = reader([text], [IMAGES[i] for i in chosen])
            inputs = {name: torch.from_numpy(np.asarray(a)) for name, a in given.items()}
            with torch.no_grad():
                made = model.generate(
                    **inputs, attention_mask=torch.ones_like(inputs["input_ids"]),
                    max_new_tokens=16, do_sample=False, output_scores=True,
                    return_dict_in_generate=True,
                )  # fmt: skip
            want = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            first = made.scores[0][0].log_softmax(-1).max().item()
            for turn in range(2):
                got = engine.generate(
                    text, {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
                    image_data=[encoded(IMAGES[i]) for i in chosen], return_logprob=True,
                )["meta_info"]  # fmt: skip
                assert [one[1] for one in got["output_token_logprobs"]] == want
                assert math.isclose(got["output_token_logprobs"][0][0], first, abs_tol=1e-4)
                assert not turn or got["cached_tokens"] >= NUM_PLACES
    finally:
        engine.shutdown()
