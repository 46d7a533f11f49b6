"""DeepSeek-VL2 with its published names through the engine, against transformers' parts and plain
code that joins the tiles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from PIL import ImageOps  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.multimodal.test_custom_encoders import (  # noqa: E402
    LATENT,
    PATCH,
    Rows,
    check,
    noisy,
    written,
)
from tests.multimodal.test_families import make_image  # noqa: E402
from tests.multimodal.tiny import SMALL, TEXT, text, tokenizer  # noqa: E402

CANDIDATES = [[28, 28], [28, 56], [56, 28], [56, 56], [84, 28]]


def padded_to(image: Any, width: int, height: int) -> torch.Tensor:
    """[3, height, width]: the image scaled to fit, centred on grey."""
    values = np.asarray(ImageOps.pad(image, (width, height), color=(127, 127, 127)), np.float32)
    return torch.tensor(values / 127.5 - 1).permute(2, 0, 1)


def best_size(image: Any) -> tuple[int, int]:
    """By trying all: the most pixels of the image, then the least padding."""
    best, most, least = (0, 0), 0, math.inf
    for width, height in CANDIDATES:
        scale = min(width / image.width, height / image.height)
        shown = int(image.width * scale) * int(image.height * scale)
        shown = min(shown, image.width * image.height)
        rest = width * height - shown
        if shown > most or (shown == most and rest < least):
            best, most, least = (width, height), shown, rest
    return best


def deepseek_rows(
    image: Any, size: tuple[int, int], encoder: Any, parts: dict[str, Any]
) -> torch.Tensor:
    """The image tokens of one image, one by one. A tile is 4 x 4 patches, 2 x 2 tokens."""

    def places(tile: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = encoder(tile[None]).last_hidden_state[0].reshape(4, 4, 32)
        squares = torch.zeros(2, 2, 128)
        for y in range(2):
            for x in range(2):
                for channel in range(32):
                    for at, (down, right) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
                        value = seen[2 * y + down, 2 * x + right, channel]
                        squares[y, x, 4 * channel + at] = value
        inner = squares @ parts["projector.layers.0.weight"].T + parts["projector.layers.0.bias"]
        inner = torch.nn.functional.gelu(inner)
        made: torch.Tensor = inner @ parts["projector.layers.2.weight"].T
        made += parts["projector.layers.2.bias"]
        return made

    made = []
    for row in places(padded_to(image, 28, 28)):
        made += [*row, parts["image_newline"]]
    made.append(parts["view_seperator"])
    large = padded_to(image, *size)
    for y in range(size[1] // 28):
        tiles = [
            places(large[:, 28 * y : 28 * y + 28, 28 * x : 28 * x + 28])
            for x in range(size[0] // 28)
        ]
        for row in range(2):
            made += [one for tile in tiles for one in tile[row]] + [parts["image_newline"]]
    return torch.stack(made)


def timm_name(name: str) -> str:
    for old, new in (
        ("vision_model.", ""), ("encoder.layers.", "blocks."), ("layer_norm", "norm"),
        ("self_attn.out_proj", "attn.proj"), ("embeddings.patch_embedding", "patch_embed.proj"),
        ("post_layernorm", "norm"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return "vision." + name


def deepseek(folder: Path, kind: str) -> tuple[Any, Rows]:
    """A checkpoint with its published names; its text model, and the encoder outputs of images."""
    tok = tokenizer("<image>")
    tok.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({
        "candidate_resolutions": CANDIDATES, "downsample_ratio": 2, "patch_size": PATCH,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_token": "<image>",
        "processor_class": "DeepseekVLV2Processor",
    }))  # fmt: skip
    torch.manual_seed(0)
    encoder = tf.SiglipVisionModel(
        tf.SiglipVisionConfig(**SMALL, hidden_act="gelu", vision_use_head=False)
    ).float().eval()  # fmt: skip
    held = text("deepseek_v2", **{**LATENT, "q_lora_rank": None})
    if kind == "plain":
        zeros = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
        held |= {"use_mla": False, "kv_lora_rank": None, "first_k_dense_replace": 2, **zeros}
        del held["head_dim"]
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**TEXT, "num_key_value_heads": 4}))
    elif kind == "sigmoid":
        held |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        config = tf.DeepseekV3Config(**held, norm_topk_prob=False, routed_scaling_factor=1.0)
        model = tf.DeepseekV3ForCausalLM(config)
    else:
        model = tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**held))
    model = model.float().eval()
    noisy(encoder)
    noisy(model)
    model.save_pretrained(folder / "text")
    saved = load_file(folder / "text" / "model.safetensors")
    tensors = {f"language.{name}": value for name, value in saved.items()}
    state = encoder.state_dict()
    for name, value in state.items():
        new = timm_name(name)
        if ".q_proj." in name:
            fused = [state[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            tensors[new.replace("self_attn.q_proj", "attn.qkv")] = torch.cat(fused)
        elif "position_embedding" in name:
            tensors["vision.pos_embed"] = value[None]
        elif ".k_proj." not in name and ".v_proj." not in name:
            tensors[new] = value
    shapes = {
        "projector.layers.0.weight": (64, 128), "projector.layers.0.bias": (64,),
        "projector.layers.2.weight": (64, 64), "projector.layers.2.bias": (64,),
        "image_newline": (64,), "view_seperator": (64,),
    }  # fmt: skip
    parts = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    written(folder, {**tensors, **parts, "vision.attn_pool.q.weight": torch.zeros(2)}, {
        "model_type": "deepseek_vl_v2", "candidate_resolutions": CANDIDATES, "tile_tag": "2D",
        "global_view_pos": "head", "language_config": held,
        "projector_config": {"model_type": "mlp_projector", "n_embed": 64, "input_dim": 32},
        "vision_config": {
            "model_type": "vision", "model_name": "siglip_so400m_patch14_384", "layers": 2,
            "width": 32, "heads": 2, "mlp_ratio": 1.5, "patch_size": PATCH, "image_size": 28,
        },
    })  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        return torch.cat(
            [deepseek_rows(image, best_size(image), encoder, parts) for image in images]
        )

    return model, rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latent", "sigmoid", "plain"])
@pytest.mark.filterwarnings("ignore")
def test_deepseek_vl2(kind: str, tmp_path: Path) -> None:
    model, rows = deepseek(tmp_path, kind)
    check(tmp_path, model, "<image>", "<image>", rows)


def test_many_images_have_no_tiles(tmp_path: Path) -> None:
    deepseek(tmp_path, "latent")
    reader = load_processor(tmp_path)
    images = [make_image(60, 20), make_image(20, 60), make_image(50, 50)]
    assert reader(text=["<image>" * 2], images=images[:2])["images_spatial_crop"].tolist() == [
        [3, 1],
        [1, 2],
    ]
    made = reader(text=["<image>" * 3], images=images)
    assert made["images_spatial_crop"].tolist() == [[1, 1]] * 3
    assert made["input_ids"].shape == (1, 3 * (6 + 1 + 6))
