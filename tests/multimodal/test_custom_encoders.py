"""Checkpoints with custom encoders through the engine: MiniCPM-V and Kimi-VL with their published
names, against transformers' parts and plain torch code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixlm.arch.hf import describe
from radixlm.base.errors import CheckpointError
from radixlm.entrypoints.offline import Engine
from radixlm.models.encoders.transformers_encoder import TransformersEncoder

pytest.importorskip("PIL")
tf = pytest.importorskip("transformers")
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.idefics2.modeling_idefics2 import (  # noqa: E402
    Idefics2VisionTransformer,
)

from radixlm.multimodal.checkpoint import load_processor  # noqa: E402
from tests.multimodal.test_families import encoded, make_image  # noqa: E402
from tests.multimodal.tiny import SMALL, text, tokenizer  # noqa: E402

NUM_NEW = 12
IMAGES = (make_image(40, 30), make_image(70, 33), make_image(29, 61))
Rows = Callable[[list[Any]], torch.Tensor]  # (pixels, grids) that the processor returns


def noisy(module: torch.nn.Module) -> None:
    """Random weights large enough to expose mistakes."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.08)


def written(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def greedy(model: Any, ids: list[int], places: list[int], rows: torch.Tensor) -> tuple[Any, float]:
    """(tokens, log-probability of the first) with encoder outputs at the placeholders."""
    embeds = model.get_input_embeddings()(torch.tensor([ids])).detach().clone()
    assert len(places) == len(rows)
    embeds[0, places] = rows
    with torch.no_grad():
        made = model.generate(
            inputs_embeds=embeds, attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NUM_NEW, do_sample=False, output_scores=True, eos_token_id=None,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
    return made.sequences[0].tolist(), made.scores[0][0].log_softmax(-1).max().item()


def anew(
    logits: Callable[[torch.Tensor], torch.Tensor], embed: Any, embeds: torch.Tensor, count: int
) -> Any:
    """Greedy tokens and logits as ``generate`` returns them; all is computed again for each token.
    ``logits``: of the last of some embeddings [1, T, D]."""
    made: list[int] = []
    scores = []
    for _ in range(count):
        whole = torch.cat([embeds, embed(torch.tensor([made], dtype=torch.long))], 1)
        scores.append(logits(whole))
        made.append(int(scores[-1].argmax()))
    return type("Made", (), {"sequences": torch.tensor([made]), "scores": scores})


def check(
    folder: Path,
    model: Any,
    place: str,
    mark: str,
    rows: Rows,
    prompts: Sequence[list[int]] = ([0], [1, 2]),
) -> None:
    """Each of several prompts twice, the second time from the cache; ``prompts``: which images."""
    engine = Engine(
        model_path=str(folder), dtype="float32", max_running_requests=4, max_total_tokens=4096,
        chunked_prefill_size=48,
    )  # fmt: skip
    reader = load_processor(folder)
    token = reader.tokenizer.convert_tokens_to_ids(place)
    try:
        for chosen in prompts:
            images = [IMAGES[i] for i in chosen]
            prompt = "look " + " and ".join(mark for _ in chosen) + " now tell"
            made = reader(text=[prompt], images=images, add_special_tokens=False)
            ids = [int(one) for one in made["input_ids"][0]]
            want, first = greedy(
                model, ids, [i for i, one in enumerate(ids) if one == token], rows(images)
            )
            for turn in range(2):
                meta = engine.generate(
                    prompt, {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
                    image_data=[encoded(image) for image in images], return_logprob=True,
                )["meta_info"]  # fmt: skip
                assert meta["prompt_tokens"] == len(ids)
                assert math.isclose(meta["output_token_logprobs"][0][0], first, abs_tol=1e-4)
                assert [one[1] for one in meta["output_token_logprobs"]] == want
                assert not turn or meta["cached_tokens"] >= (len(ids) - 1) // 16 * 16
    finally:
        engine.shutdown()


# ---- MiniCPM-V ---------------------------------------------------------------------------------

PATCH, SIDE, QUERIES, DIM = 7, 28, 4, 256
PLAIN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": DIM}
MINICPM = [
    ("MiniCPMV", 2.6, "qwen2", "Qwen2ForCausalLM"),
    pytest.param("MiniCPMV", "4.0", "llama", "LlamaForCausalLM", marks=pytest.mark.slow),
    ("MiniCPMO", "4.5", "qwen3", "Qwen3ForCausalLM"),
]


def resampled(parts: dict[str, torch.Tensor], patches: Any, height: int, width: int) -> Any:
    """The resampler, head by head, with the sines of each position."""

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            x, (DIM,), parts[f"{name}.weight"], parts[f"{name}.bias"], 1e-6
        )

    sines = torch.zeros(height * width, DIM)
    for at in range(height * width):
        for half, where in enumerate((at % width, at // width)):
            for i in range(DIM // 4):
                angle = where / 10000 ** (i / (DIM // 4))
                sines[at, half * DIM // 2 + i] = math.sin(angle)
                sines[at, half * DIM // 2 + DIM // 4 + i] = math.cos(angle)
    values = normed(patches @ parts["kv_proj.weight"].T, "ln_kv")
    weights = parts["attn.in_proj_weight"].chunk(3)
    biases = parts["attn.in_proj_bias"].chunk(3)
    given = (normed(parts["query"], "ln_q"), values + sines, values)
    q, k, v = (x @ w.T + b for x, w, b in zip(given, weights, biases, strict=True))
    heads = []
    for head in range(DIM // 128):
        own = slice(128 * head, 128 * (head + 1))
        heads.append((q[:, own] @ k[:, own].T / 128**0.5).softmax(-1) @ v[:, own])
    seen = torch.cat(heads, -1) @ parts["attn.out_proj.weight"].T + parts["attn.out_proj.bias"]
    return normed(seen, "ln_post") @ parts["proj"]


def resampler_weights() -> dict[str, torch.Tensor]:
    shapes = {
        "query": (QUERIES, DIM), "kv_proj.weight": (DIM, 32), "proj": (DIM, DIM),
        "attn.in_proj_weight": (3 * DIM, DIM), "attn.in_proj_bias": (3 * DIM,),
        "attn.out_proj.weight": (DIM, DIM), "attn.out_proj.bias": (DIM,),
        **{f"{ln}.{kind}": (DIM,) for ln in ("ln_q", "ln_kv", "ln_post")
           for kind in ("weight", "bias")},
    }  # fmt: skip
    return {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}


def minicpm(
    folder: Path, architecture: str, version: Any, kind: str, name: str
) -> tuple[Any, Rows]:
    """A checkpoint with its published names; its text model, and the encoder outputs of images."""
    names = "<image> </image> <slice> </slice> <image_id> </image_id>".split()
    tok = tokenizer(*names, "<unk>")
    tok.unk_token = "<unk>"
    tok.save_pretrained(folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.A", "own.B"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    held = {**text(kind), **PLAIN}
    kinds = {"qwen2": tf.Qwen2Config, "llama": tf.LlamaConfig, "qwen3": tf.Qwen3Config}
    held.pop("model_type")
    torch.manual_seed(0)
    model = getattr(tf, name)(kinds[kind](**held)).float().eval()
    tower_config = tf.Idefics2VisionConfig(**{**SMALL, "image_size": 70})
    tower_config._attn_implementation = "eager"
    encoder = Idefics2VisionTransformer(tower_config).float().eval()
    noisy(model)
    noisy(encoder)
    parts = resampler_weights()
    tensors = {f"llm.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"vpm.{k}": v for k, v in encoder.state_dict().items()}
    tensors |= {f"resampler.{k}": v for k, v in parts.items()}
    tensors |= {"apm.conv1.weight": torch.zeros(2), "tts.emb.weight": torch.zeros(2)}
    vision = {**SMALL, "image_size": 70, "model_type": "siglip_vision_model"}
    written(folder, tensors, {
        **held, "architectures": [architecture], "model_type": architecture.lower(),
        "version": version, "query_num": QUERIES, "drop_vision_last_layer": False,
        "slice_config": {"max_slice_nums": 9, "patch_size": PATCH, "scale_resolution": SIDE},
        "use_image_id": True, "vision_config": vision, "tie_word_embeddings": False,
    })  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        made = []
        for image in images:
            for one in slices(image):
                pixels = torch.tensor(np.asarray(one, np.float32) / 127.5 - 1).permute(2, 0, 1)
                height, width = one.height // PATCH, one.width // PATCH
                mask = torch.ones(1, height, width, dtype=torch.bool)
                with torch.no_grad():
                    seen = encoder(pixels[None], patch_attention_mask=mask).last_hidden_state[0]
                made.append(resampled(parts, seen, height, width))
        return torch.cat(made)

    return model, rows


def slices(image: Any) -> list[Any]:
    """Slices as in the image processor of MiniCPM-V 4.6, in patches of one."""
    cut = tf.MiniCPMV4_6ImageProcessorPil()
    size = image.height, image.width
    grid = cut.get_sliced_grid(size, 9, SIDE)
    height, width = cut.find_best_resize(size, SIDE, PATCH / 4, "16x", allow_upscale=grid is None)
    made = [image.resize((int(width), int(height)), Image.Resampling.BICUBIC)]
    if grid is None:
        return made
    height, width = cut.get_refine_size(size, grid, SIDE, PATCH / 4, "16x", allow_upscale=True)
    large = image.resize((int(width), int(height)), Image.Resampling.BICUBIC)
    high, wide = int(height) // grid[0], int(width) // grid[1]
    return made + [
        large.crop((x * wide, y * high, (x + 1) * wide, (y + 1) * high))
        for y in range(grid[0])
        for x in range(grid[1])
    ]


@pytest.mark.parametrize(("architecture", "version", "kind", "name"), MINICPM)
@pytest.mark.filterwarnings("ignore")
def test_minicpm(architecture: str, version: Any, kind: str, name: str, tmp_path: Path) -> None:
    model, rows = minicpm(tmp_path, architecture, version, kind, name)
    check(tmp_path, model, "<unk>", "(<image>./</image>)", rows)


def test_slices_are_named_in_the_text(tmp_path: Path) -> None:
    minicpm(tmp_path, "MiniCPMV", 2.6, "qwen2", "Qwen2ForCausalLM")
    reader = load_processor(tmp_path)
    mark = reader.image_token
    made = reader(text=[f"{mark}\n{mark}a"], images=[make_image(20, 30), make_image(40, 41)])
    places = "<unk>" * QUERIES
    row = f"<slice>{places}</slice>"
    assert reader.tokenizer.decode(made["input_ids"][0]) == (
        f"<image_id>0</image_id><image>{places}</image>\n"
        f"<image_id>1</image_id><image>{places}</image>{row}{row}\n{row}{row}a"
    )
    assert made["tgt_sizes"].tolist() == [[5, 3], [4, 4], *[[4, 4]] * 4]
    assert len(made["pixel_values"]) == (made["tgt_sizes"].prod(-1)).sum()
    with pytest.raises(ValueError, match="2 placeholders for 1"):
        reader(text=[mark + mark], images=[make_image(20, 30)])


@pytest.mark.parametrize("change", [{"version": "2.5"}, {"version": 9}, {"vision_config": 3}])
def test_another_version_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    minicpm(tmp_path, "MiniCPMV", 2.6, "qwen2", "Qwen2ForCausalLM")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(CheckpointError):
        describe(tmp_path)
        TransformersEncoder(tmp_path, torch.device("cpu"), torch.float32)


# ---- Kimi-VL -----------------------------------------------------------------------------------

LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MOONVIT = {
    **SMALL, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "merge_kernel_size": [2, 2],
    "model_type": "moonvit",
}  # fmt: skip


def kimi_name(name: str) -> str:
    """The published name of a tensor of Kimi K2.5's class."""
    for old, new in (
        ("vision_tower.layers.", "vision_tower.encoder.blocks."), (".norm1.", ".norm0."),
        (".norm2.", ".norm1."), ("mlp.fc1", "mlp.fc0"), ("mlp.fc2", "mlp.fc1"),
        ("attn.proj", "wo"), ("final_layernorm", "encoder.final_layernorm"),
        ("position_embeddings", "weight"), ("mm_projector", "multi_modal_projector"),
        ("in_proj", "linear_1"), ("out_proj", "linear_2"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def neighbours(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys with the two channels of each rope pair next to each other."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def moonvit(held: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A Kimi K2.5 whose encoder is that of ``MOONVIT``, and the encoder's published tensors."""
    encoder = {**SMALL, "pos_emb_height": 8, "pos_emb_width": 8, "merge_kernel_size": [2, 2]}
    whole = tf.Kimi_K25ForConditionalGeneration(tf.Kimi_K25Config(
        vision_config=encoder, text_config=dict(held), projection_hidden_size=32,
        tie_word_embeddings=False,
    )).float().eval()  # fmt: skip
    noisy(whole.model.vision_tower)
    noisy(whole.model.mm_projector)
    state = {
        k: v for k, v in whole.model.state_dict().items() if not k.startswith("language_model")
    }
    tensors = {}
    for name, value in state.items():
        if ".attn.q_proj." in name:
            k, v = (state[name.replace("q_proj", one)] for one in ("k_proj", "v_proj"))
            fused = torch.cat([neighbours(value, 2), neighbours(k, 2), v])
            tensors[kimi_name(name.replace("attn.q_proj", "wqkv"))] = fused
        elif ".attn.k_proj." not in name and ".attn.v_proj." not in name:
            tensors[kimi_name(name)] = value
    return whole, tensors


def kimi(folder: Path) -> tuple[Any, Rows]:
    """A checkpoint with its published names; its text model, and the encoder outputs of images."""
    tok = tokenizer("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
    tok.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "in_token_limit": 24, "merge_kernel_size": [2, 2], "patch_size": PATCH, "pad_input": True,
        "image_processor_type": "KimiVLImageProcessor", "auto_map": {"AutoProcessor": "other.py"},
    }))  # fmt: skip
    torch.manual_seed(0)
    held = text("deepseek_v3", **LATENT)
    whole, tower = moonvit(held)
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**held)).float().eval()
    noisy(model)
    text_folder = folder / "text"
    model.save_pretrained(text_folder)
    tensors = tower | {
        f"language_model.{k}": v for k, v in load_file(text_folder / "model.safetensors").items()
    }
    written(folder, tensors, {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl",
        "media_placeholder_token_id": tok.convert_tokens_to_ids("<|media_pad|>"),
        "text_config": held, "vision_config": MOONVIT, "tie_word_embeddings": False,
    })  # fmt: skip

    def rows(images: list[Any]) -> torch.Tensor:
        made = []
        for image in images:
            pixels, grid = padded(image)
            with torch.no_grad():
                made += whole.model.get_image_features(pixels, torch.tensor([grid])).pooler_output
        return torch.cat(made)

    return model, rows


def padded(image: Any) -> tuple[torch.Tensor, list[int]]:
    """At most 24 patches, then black padding up to whole squares of four."""
    if (image.width // PATCH) * (image.height // PATCH) > 24:
        scale = math.sqrt(24 / ((image.width // PATCH) * (image.height // PATCH)))
        size = int(image.width * scale), int(image.height * scale)
        image = image.resize(size, Image.Resampling.BICUBIC)
    values = np.asarray(image, np.float32)
    values = np.pad(values, ((0, -len(values) % 14), (0, -values.shape[1] % 14), (0, 0)))
    values = values / 127.5 - 1
    rows, columns = values.shape[0] // PATCH, values.shape[1] // PATCH
    cut = [
        values[7 * y : 7 * y + 7, 7 * x : 7 * x + 7].transpose(2, 0, 1)
        for y in range(rows)
        for x in range(columns)
    ]
    return torch.tensor(np.stack(cut)), [1, rows, columns]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_kimi_vl(tmp_path: Path) -> None:
    model, rows = kimi(tmp_path)
    mark = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    check(tmp_path, model, "<|media_pad|>", mark, rows)
