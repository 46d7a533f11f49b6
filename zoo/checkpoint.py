"""Hugging Face folders: write a trained decoder with its tokenizer, and read it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from chat import MARKUP, SPECIAL, TEMPLATE, Encoder
from model import MATRICES, VECTORS, Shape, Tiny
from safetensors.torch import load_file, save_file
from torch import Tensor


def config(shape: Shape, end: int, pad: int) -> dict[str, Any]:
    """config.json of the Qwen3 class."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }


def named_weights(model: Tiny) -> dict[str, Tensor]:
    """Weights by their Hugging Face names, float32."""
    weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i in range(model.shape.layers):
        for own, name in MATRICES.items():
            weights[f"model.layers.{i}.{name}.weight"] = model.matrix[own][i]
        for own, name in VECTORS.items():
            weights[f"model.layers.{i}.{name}.weight"] = model.vector[own][i]
    return {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}


def read(folder: Path) -> Tiny:
    """The decoder of a Hugging Face folder, float32."""
    c = json.loads((folder / "config.json").read_text())
    shape = Shape(
        c["vocab_size"], c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"],
        c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"],
        c["max_position_embeddings"], c["rope_theta"],
    )  # fmt: skip
    model, held = Tiny(shape), load_file(folder / "model.safetensors")
    with torch.no_grad():
        model.embed.copy_(held["model.embed_tokens.weight"])
        model.norm.copy_(held["model.norm.weight"])
        for i in range(shape.layers):
            for own, name in MATRICES.items():
                model.matrix[own][i].copy_(held[f"model.layers.{i}.{name}.weight"])
            for own, name in VECTORS.items():
                model.vector[own][i].copy_(held[f"model.layers.{i}.{name}.weight"])
    return model


def export_tokenizer(encoder: Encoder, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.tokenizer.save(str(folder / "tokenizer.json"))
    pad = encoder.ids("<|endoftext|>")[0]
    added = {
        str(encoder.ids(token)[0]): {
            "content": token, "lstrip": False, "normalized": token in MARKUP, "rstrip": False,
            "single_word": False, "special": token in SPECIAL,
        }
        for token in SPECIAL + MARKUP
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    generation = {
        "do_sample": True, "temperature": 0.2, "eos_token_id": [encoder.end, pad],
        "pad_token_id": pad, "max_new_tokens": 1024,
    }  # fmt: skip
    _write(folder / "generation_config.json", generation)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(model: Tiny, encoder: Encoder, folder: Path) -> None:
    """Write the whole folder in bfloat16, each file whole before it takes its name."""
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    export_tokenizer(encoder, partial)
    pad = encoder.ids("<|endoftext|>")[0]
    _write(partial / "config.json", config(model.shape, encoder.end, pad))
    weights = {name: tensor.bfloat16() for name, tensor in named_weights(model).items()}
    save(weights, partial / "model.safetensors")
    publish(partial, folder)


def save(weights: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file that everyone may read."""
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def publish(partial: Path, folder: Path) -> None:
    """Move whole files into the folder that readers look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        target = folder / path.relative_to(partial)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
    shutil.rmtree(partial)
