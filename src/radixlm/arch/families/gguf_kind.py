"""What the tables of GGUF architectures are made of: the record of one, names of tensors, and keys
of config.json that several have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from radixlm.arch.gguf import GgufHeader
from radixlm.base.record import Record

Change = Callable[[Any], Any]  # of a tensor, by its methods alone

ATTENTION = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
}
DENSE = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
PRE = {**ATTENTION, **DENSE, "ffn_norm": "post_attention_layernorm"}


class Kind(Record):
    """An architecture of llama.cpp. ``names``: of a layer's tensors, "{}" for the expert, below
    ``prefix`` and the layer's number; ``ends``: of tensors outside layers, where they are others
    than Llama's. ``is_permuted``: rows of q and k are stored in pairs; ``norm_offset``: added to
    norm weights by the converter; ``more``: further keys of config.json. By name in the layer:
    ``rows``: how rows are put back into the order of the checkpoint; ``changes``: what else the
    converter did, undone; ``pairs``: of a tensor that the converter took apart, the other part, and
    what joins both."""

    architecture: str
    model_type: str
    names: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0
    last_norm: str = "model.norm"
    more: Callable[[GgufHeader], dict[str, Any]] = lambda _: {}
    changes: Callable[[GgufHeader], Mapping[str, Change]] = lambda _: {}
    rows: Callable[[GgufHeader], Mapping[str, Change]] = lambda _: {}
    pairs: Mapping[str, tuple[str, Callable[[Any, Any], Any]]] = {}
    prefix: str = "model.layers."
    ends: Mapping[str, str] = {}


Row = Kind | Callable[[GgufHeader], Kind]  # the latter where the header tells which it is
Kinds = Mapping[str, Row]  # by llama.cpp's name


def has(h: GgufHeader, part: str) -> bool:
    """Whether any layer has this tensor: "attn_q.bias"."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in h.tensors)


def rows_of(h: GgufHeader, part: str) -> int | None:
    """How many rows this tensor has in the first layer that has it, by expert."""
    for name, tensor in h.tensors.items():
        if name.startswith("blk.") and name.endswith(f".{part}.weight") and len(tensor.shape) > 1:
            return tensor.shape[-2]
    return None


def num_layers(h: GgufHeader) -> int:
    """Without those that predict further tokens, which the header counts too."""
    further = h.count("nextn_predict_layers") if h.own("nextn_predict_layers") else 0
    return h.count("block_count") - further


def layers_with(h: GgufHeader, part: str) -> list[bool]:
    """Of each layer, whether it has this tensor."""
    return [f"blk.{i}.{part}" in h.tensors for i in range(num_layers(h))]


def experts(h: GgufHeader) -> dict[str, Any]:
    """How many experts there are, how many a token has, and their size."""
    return {
        "num_experts": h.count("expert_count"),
        "num_experts_per_tok": h.count("expert_used_count"),
        "moe_intermediate_size": h.own("expert_feed_forward_length")
        or rows_of(h, "ffn_up_exps")
        or h.count("feed_forward_length"),
    }


def corrected_experts(h: GgufHeader) -> dict[str, Any]:
    """Experts behind some dense layers, chosen by groups and with a correction."""
    return {
        **experts(h),
        "num_hidden_layers": num_layers(h),
        "n_shared_experts": h.own("expert_shared_count", 0),
        "first_k_dense_replace": _dense_layers(h),
        "routed_scaling_factor": h.own("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(h.own("expert_weights_norm", True)),
        "n_group": h.own("expert_group_count", 1),
        "topk_group": h.own("expert_group_used_count", 1),
    }


def _dense_layers(h: GgufHeader) -> int:
    """Files may count them wrong; the tensors tell."""
    sparse = layers_with(h, "ffn_gate_inp.weight")
    return sparse.index(True) if True in sparse else len(sparse)


def layer_norm(h: GgufHeader) -> dict[str, Any]:
    """Of layer norms, under the names of several families."""
    eps = h.own("attention.layer_norm_epsilon", 1e-5)
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
    return dict.fromkeys(names, eps)


def partial_of_heads(h: GgufHeader) -> dict[str, Any]:
    """Rotation of so many channels of each head, which the header may not count."""
    heads = h.count("attention.head_count")
    width = (rows_of(h, "attn_q") or h.count("embedding_length")) // heads
    head_dim = h.count("attention.key_length", width)
    share = h.count("rope.dimension_count", head_dim) / head_dim
    return {"head_dim": head_dim, "partial_rotary_factor": share}
