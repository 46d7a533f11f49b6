"""dots.ocr and dots.vlm1 with their published names and configs, against plain torch code and the
classes of Qwen 2 and DeepSeek V3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402

from tests.multimodal.test_custom_encoders import check, noisy, written  # noqa: E402
from tests.multimodal.tiny import image_processor, text, tokenizer  # noqa: E402

WIDTH, HEADS, INNER, SIZE, DIM = 32, 2, 48, 7, 64
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    at, wide = "vision_tower.", 4 * WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.patchifier.proj.weight": (WIDTH, 3, SIZE, SIZE),
        "patch_embed.patchifier.proj.bias": (WIDTH,),
        "patch_embed.patchifier.norm.weight": (WIDTH,),
        "post_trunk_norm.weight": (WIDTH,),
        "merger.ln_q.weight": (WIDTH,), "merger.ln_q.bias": (WIDTH,),
        "merger.mlp.0.weight": (wide, wide), "merger.mlp.0.bias": (wide,),
        "merger.mlp.2.weight": (DIM, wide), "merger.mlp.2.bias": (DIM,),
    }  # fmt: skip
    for i in range(2):
        block = f"blocks.{i}."
        shapes |= {f"{block}norm{n}.weight": (WIDTH,) for n in (1, 2)}
        shapes |= {f"{block}attn.qkv.weight": (3 * WIDTH, WIDTH)}
        shapes |= {f"{block}attn.proj.weight": (WIDTH, WIDTH)}
        shapes |= {f"{block}mlp.fc{n}.weight": (INNER, WIDTH) for n in (1, 3)}
        shapes |= {f"{block}mlp.fc2.weight": (WIDTH, INNER)}
    torch.manual_seed(1)
    return {at + name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    """A head's channels [N, 16]: the first half of the pairs turns by the row, the others by the
    column of the patch."""
    a, b = x.chunk(2, -1)
    angles = torch.tensor([
        [place * 10000 ** (-i / 4) for place in pair for i in range(4)] for pair in places
    ])  # fmt: skip
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def encode(w: Weights, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    at = "vision_tower."
    places = [
        (y + dy, x + dx)
        for y in range(0, rows, 2) for x in range(0, columns, 2) for dy in (0, 1) for dx in (0, 1)
    ]  # fmt: skip
    embed = at + "patch_embed.patchifier."
    kernel = w[embed + "proj.weight"].flatten(1)
    h = rms(patches @ kernel.T + w[embed + "proj.bias"], w[embed + "norm.weight"])
    for i in range(2):
        block = f"{at}blocks.{i}."
        qkv = F.linear(rms(h, w[block + "norm1.weight"]), w[block + "attn.qkv.weight"]).chunk(3, -1)
        heads = []
        for one in range(HEADS):
            q, k, v = (part[:, 16 * one : 16 * one + 16] for part in qkv)
            heads.append((turned(q, places) @ turned(k, places).T / 4).softmax(-1) @ v)
        h = h + F.linear(torch.cat(heads, -1), w[block + "attn.proj.weight"])
        x = rms(h, w[block + "norm2.weight"])
        gate, up = (F.linear(x, w[f"{block}mlp.fc{n}.weight"]) for n in (1, 3))
        h = h + F.linear(F.silu(gate) * up, w[block + "mlp.fc2.weight"])
    h = rms(h, w[at + "post_trunk_norm.weight"])
    h = F.layer_norm(h, (WIDTH,), w[at + "merger.ln_q.weight"], w[at + "merger.ln_q.bias"], 1e-6)
    first, second = (at + f"merger.mlp.{n}." for n in (0, 2))
    h = F.gelu(F.linear(h.reshape(-1, 4 * WIDTH), w[first + "weight"], w[first + "bias"]))
    return F.linear(h, w[second + "weight"], w[second + "bias"])


DEEPSEEK = {
    **text("deepseek_v3"), "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "topk_method": "noaux_tc",
}  # fmt: skip
CASES = {  # architecture -> model_type, config of the text model, its class, further keys
    "DotsOCRForCausalLM": (
        "dots_ocr", text("qwen2"), tf.Qwen2ForCausalLM,
        {"attention_bias": True, "use_sliding_window": False, "max_window_layers": 28},
    ),
    "DotsVLMForCausalLM": ("dots_vlm", DEEPSEEK, tf.DeepseekV3ForCausalLM, {}),
}  # fmt: skip


@pytest.mark.parametrize("architecture", CASES)
@pytest.mark.filterwarnings("ignore")
def test_published_checkpoints(architecture: str, tmp_path: Path) -> None:
    model_type, held, kind, more = CASES[architecture]
    tok = tokenizer("<|img|>", "<|imgpad|>", "<|endofimg|>")
    tok.save_pretrained(tmp_path)
    options = {"patch_size": SIZE, "temporal_patch_size": 1, "merge_size": 2}
    pixels = {"min_pixels": 14 * 14, "max_pixels": 56 * 56}
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "DotsVLProcessor"}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**options, **pixels, **kinds}))
    model = kind(kind.config_class(**held)).float().eval()
    noisy(model)
    model.save_pretrained(tmp_path / "text")
    encoder, decoder = weights(), load_file(tmp_path / "text" / "model.safetensors")
    vision = {
        "embed_dim": WIDTH, "hidden_size": DIM, "intermediate_size": INNER, "patch_size": SIZE,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_channels": 3, "post_norm": True,
        "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 1, "use_bias": False,
    }  # fmt: skip
    written(tmp_path, decoder | encoder, {
        **held, **more, "architectures": [architecture], "model_type": model_type,
        "vision_config": vision, "image_token_id": tok.convert_tokens_to_ids("<|imgpad|>"),
        "auto_map": {"AutoConfig": "configuration_dots.DotsOCRConfig"}, "video_token_id": 151656,
    })  # fmt: skip
    reader = image_processor("Qwen2VL", **options, **pixels)

    def rows(images: list[Any]) -> torch.Tensor:
        made = []
        for image in images:
            read = reader(images=[image], return_tensors="pt")
            made.append(
                encode(encoder, read["pixel_values"], *read["image_grid_thw"][0, 1:].tolist())
            )
        return torch.cat(made)

    check(tmp_path, model, "<|imgpad|>", "<|img|><|imgpad|><|endofimg|>", rows)
