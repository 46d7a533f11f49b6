"""A description of any decoder by its attention layers alone: heads, their width, how many layers.
For models that run as transformers' own classes (``models/transformers_backend``)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.json_file import read_object
from radixlm.arch.spec import Attention, Block, Decoder, Norm
from radixlm.base.errors import CheckpointError

_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "n_kv_heads", "num_key_value_groups"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
}


def load_generic(folder: Path, overrides: Mapping[str, Any]) -> Config:
    """The text config of any checkpoint folder; CheckpointError names a missing key."""
    path = folder / "config.json"
    raw = read_object(path) | dict(overrides)
    text = raw.get("text_config")
    values = {**raw, **text} if isinstance(text, dict) else dict(raw)
    for name, others in _SPELLINGS.items():
        found = [values[other] for other in (name, *others) if values.get(other) is not None]
        if found:
            values[name] = found[0]
    heads = values.get("num_attention_heads")
    values.setdefault("num_key_value_heads", heads)
    values.setdefault("max_position_embeddings", 2048)
    for name in (*_SPELLINGS, "vocab_size"):
        value = values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: {name!r} = {value!r} must be a positive integer")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    is_flat = isinstance(rope, dict) and isinstance(rope.get("rope_type"), str)
    values["rope_parameters"] = rope if is_flat else {}
    listed = raw.get("architectures")
    values["architecture"] = str(listed[0]) if isinstance(listed, list) and listed else "?"
    return Config(values, str(path), frozenset(values))


def describe_generic(c: Config) -> Decoder:
    """Equal attention layers; nothing else of the model is known."""
    dim = c.get("head_dim") or c.divide("hidden_size", "num_attention_heads")
    norm = Norm(1e-6)
    mixer = Attention(c.num_attention_heads, c.num_key_value_heads, int(dim), None)
    return Decoder(
        vocab=c.vocab_size,
        dim=c.hidden_size,
        blocks=tuple(Block(mixer, None, norm) for _ in range(c.num_hidden_layers)),
        norm=norm,
        max_positions=c.max_position_embeddings,
    )
