"""Tiny assistants of Gemma 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny

HIDDEN = 64  # channels of the target


def make_assistant(folder: Path, architecture: str, clusters: int) -> Any:
    """Save an assistant with random weights of a tiny target; its Hugging Face model in float32.
    ``clusters``: of which 4 are read, 0 for none."""
    saved = json.loads((cached_tiny(architecture) / "config.json").read_text())
    target = saved | ARCHITECTURES[architecture]
    kept = ("head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")
    kept += ("attention_k_eq_v", "sliding_window", "vocab_size", "rope_parameters")
    text = {key: target[key] for key in kept if key in target}
    text |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "hidden_size_per_layer_input": 0}
    text |= {
        "vocab_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    stem = architecture.removesuffix("ForCausalLM")
    config = getattr(tf, f"{stem}AssistantConfig")(
        text_config=getattr(tf, f"{stem}TextConfig")(**text),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=bool(clusters),
        num_centroids=max(clusters, 1),
        centroid_intermediate_top_k=4,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(tf, f"{stem}AssistantForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(float("norm" in name), 0.15)
        if clusters:
            model.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
    model.save_pretrained(folder)
    return model
