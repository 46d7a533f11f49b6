"""Checkpoints whose encoders have names of their own and no class in transformers under their
architecture, as those of a class that has the same layers: config keys, names, the processor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from radixlm.base.record import Record

Raw = Mapping[str, Any]
Rules = tuple[tuple[str, str], ...]


class Original(Record):
    """``config``: config.json -> that of the class, with its model_type and, of its text model,
    what the encoders need to know. ``names``: patterns and replacements of the encoders' tensors,
    the
    first that fits counts; "[a|b|c]" in a replacement cuts a tensor's rows into equal parts.
    ``processor``: the class of the processor, ``reader`` that of the image processor without its
    suffix; ``options`` make the arguments of the one, ``reader_options`` of the other; ``tokens``:
    attribute of the tokenizer -> token. ``parts``: the processor's attribute -> class of what it
    needs besides. ``completed``: config.json with what it takes from elsewhere. ``classes``: of the
    processor and the reader where the config tells them. ``beside``: another folder with weights of
    the encoders. ``adds_tokens``: the tokenizer gets the ``tokens`` that it lacks, behind its own.
    ``videos``: the class of the video processor and its arguments."""

    config: Callable[[Raw], dict[str, Any]]
    names: Rules
    processor: str = ""
    reader: str = ""
    options: Callable[[Raw], dict[str, Any]] = lambda raw: {}
    reader_options: Callable[[Raw], dict[str, Any]] = lambda raw: {}
    tokens: Mapping[str, str] | None = None
    parts: Mapping[str, str] | None = None
    unused: str = r"$."  # pattern of what the class has and the encoders here have not
    completed: Callable[[Raw, Path], Raw] = lambda raw, folder: raw
    classes: Callable[[Raw], tuple[str, str]] | None = None
    beside: Callable[[Raw, Path], Path | None] = lambda raw, folder: None
    adds_tokens: bool = False
    videos: Callable[[Raw], tuple[str, dict[str, Any]]] | None = None

    def renamed(self, name: str) -> list[str]:
        """The class's names of a checkpoint's tensor; [] if it is not one of the encoders'."""
        for pattern, replacement in self.names:
            if re.match(pattern, name):
                new = re.sub(pattern, replacement, name, count=1)
                choice = re.search(r"\[(.*?)\]", new)
                parts = choice.group(1).split("|") if choice else [""]
                return [re.sub(r"\[.*?\]", part, new, count=1) for part in parts]
        return []


def stub(hidden_size: int) -> dict[str, Any]:
    """A text model of which only the width counts."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2, "vocab_size": 2}
    return {"model_type": "llama", "num_hidden_layers": 0, **sizes, **heads}


# ---- InternVL ---------------------------------------------------------------------------------

_BLOCK, _LAYER = r"vision_model\.encoder\.layers\.(\d+)\.", r"vision_tower.encoder.layer.\1."
_INTERNVL: Rules = (
    (r"vision_model\.embeddings\.class_embedding", "vision_tower.embeddings.cls_token"),
    (
        r"vision_model\.embeddings\.position_embedding",
        "vision_tower.embeddings.position_embeddings",
    ),
    (
        r"vision_model\.embeddings\.patch_embedding",
        "vision_tower.embeddings.patch_embeddings.projection",
    ),
    (_BLOCK + r"attn\.qkv", _LAYER + "attention.[q|k|v]_proj"),
    (_BLOCK + r"attn\.proj", _LAYER + "attention.projection_layer"),
    (_BLOCK + r"attn\.", _LAYER + "attention."),
    (_BLOCK + "norm1", _LAYER + "layernorm_before"),
    (_BLOCK + "norm2", _LAYER + "layernorm_after"),
    (_BLOCK + "ls1", _LAYER + "lambda_1"),
    (_BLOCK + "ls2", _LAYER + "lambda_2"),
    (_BLOCK + r"mlp\.", _LAYER + "mlp."),
    (r"mlp1\.0", "multi_modal_projector.layer_norm"),
    (r"mlp1\.1", "multi_modal_projector.linear_1"),
    (r"mlp1\.3", "multi_modal_projector.linear_2"),
)


def _internvl(raw: Raw) -> dict[str, Any]:
    vision = raw["vision_config"]
    llm = raw.get("llm_config") or raw.get("text_config") or {}
    kept = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("hidden_act", "norm_type", "layer_norm_eps", "num_channels"),
    )
    encoder = {key: vision[key] for key in kept if key in vision}
    size, patch = vision.get("image_size", 448), vision.get("patch_size", 14)
    return {
        "model_type": "internvl",
        "downsample_ratio": raw.get("downsample_ratio", 0.5),
        "vision_feature_layer": raw.get("select_layer", -1),
        "text_config": stub(int(llm["hidden_size"])),
        "vision_config": {
            **encoder,
            "image_size": [size, size],
            "patch_size": [patch, patch],
            "attention_bias": vision.get("qkv_bias", False),
            "use_qk_norm": vision.get("qk_normalization", False),
            "use_mask_token": False,
        },
    }


def _side(raw: Raw) -> int:
    return int(raw.get("force_image_size") or raw["vision_config"].get("image_size", 448))


def _internvl_options(raw: Raw) -> dict[str, Any]:
    side = _side(raw) // int(raw["vision_config"].get("patch_size", 14))
    return {"image_seq_length": int(side**2 * raw.get("downsample_ratio", 0.5) ** 2)}


def _internvl_reader(raw: Raw) -> dict[str, Any]:
    return {
        "size": {"height": _side(raw), "width": _side(raw)},
        "crop_to_patches": bool(raw.get("dynamic_image_size", True)),
        "min_patches": int(raw.get("min_dynamic_patch", 1)),
        "max_patches": int(raw.get("max_dynamic_patch", 12)),
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

# ---- Phi-4-multimodal ---------------------------------------------------------------------------

_IMAGE = "embed_tokens_extend.image_embed."
_PHI4: Rules = (
    (rf"model\.{_IMAGE}img_projection\.0", _IMAGE + "img_projection_up"),
    (rf"model\.{_IMAGE}img_projection\.2", _IMAGE + "img_projection_down"),
    (rf"model\.{_IMAGE}glb_GN", _IMAGE + "global_img_feature_extensor"),
    (rf"model\.{_IMAGE}sub_GN", _IMAGE + "sub_img_feature_extensor"),
    (rf"model\.{_IMAGE}img_processor\.", _IMAGE + "img_processor."),
)


def _phi4(raw: Raw) -> dict[str, Any]:
    """The encoder is always the same one, SigLIP of 448 pixels; speech is not looked at."""
    text = {"hidden_size": raw["hidden_size"], "vocab_size": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 2}
    ears = {"hidden_size": 8, "num_blocks": 0, "num_attention_heads": 1, "intermediate_size": 2}
    channels = {"nemo_conv_channels": 2, "ext_pw_out_channel": 2}
    return {
        "model_type": "phi4_multimodal",
        "num_hidden_layers": 0,
        **text,
        **heads,
        "vision_config": dict(raw.get("vision_config") or {}),
        "audio_config": {**ears, **channels},
    }


ORIGINALS: dict[str, Original] = {
    "InternVLChatModel": Original(
        _internvl,
        _INTERNVL,
        "InternVLProcessor",
        "GotOcr2",
        _internvl_options,
        _internvl_reader,
        _INTERNVL_TOKENS,
    ),
    "Phi4MMForCausalLM": Original(
        _phi4,
        _PHI4,
        "Phi4MultimodalProcessor",
        "Phi4Multimodal",
        tokens={"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        parts={"audio_processor": "Phi4MultimodalFeatureExtractor"},
        unused=r"norm\.|layers\.|embed_tokens\.|embed_tokens_extend\.audio_embed\.",
    ),
}
