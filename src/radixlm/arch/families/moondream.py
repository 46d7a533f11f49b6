"""Moondream 2 and 3: Phi's blocks; in Moondream 3 with experts, and with queries and values that
are scaled by the token and its position."""

from collections.abc import Mapping
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.names import Named, Names
from radixlm.arch.recipes import no_biases, unit_biases_of_up
from radixlm.arch.spec import AttentionExtras, Decoder, Mlp, Moe, Norm

_BLOCK = "model.text.blocks.{i}."
_NAMES: Names = {
    "embed": "model.text.wte",
    "norm": "model.text.post_ln",
    "head": "model.text.lm_head",
    "norm1": _BLOCK + "ln",
    "mixer.qkv": _BLOCK + "attn.qkv",
    "mixer.o": _BLOCK + "attn.proj",
    "mixer.scaling.q": _BLOCK + "attn.tau.wq",
    "mixer.scaling.v": _BLOCK + "attn.tau.wv",
    "mixer.scaling.rate": _BLOCK + "attn.tau.alpha",
    "ffn.up1": _BLOCK + "mlp.fc1",
    "ffn.down": _BLOCK + "mlp.fc2",
    "moe.router": _BLOCK + "mlp.router",
    "moe.up": _BLOCK + "mlp.fc1.weight",
    "moe.down": _BLOCK + "mlp.fc2.weight",
    "moe.up_bias": Named((_BLOCK + "mlp.fc1.weight",), unit_biases_of_up),
    "moe.down_bias": Named((_BLOCK + "mlp.fc2.weight",), no_biases),
}
# keys of config.json's "config", "text" -> those of other decoders, with their defaults
_KEYS: Mapping[str, tuple[str, int]] = {
    "dim": ("hidden_size", 2048),
    "ff_dim": ("intermediate_size", 8192),
    "n_layers": ("num_hidden_layers", 24),
    "vocab_size": ("vocab_size", 51200),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", 32),
}
_EXPERTS = {"num_experts": 64, "start_layer": 4, "experts_per_token": 8, "expert_inner_dim": 1024}
_CONTEXTS = {2: 2048, 3: 4096}
_THETAS = {2: 10_000.0, 3: 1_500_000.0}


def moondream_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``config`` at the top. Moondream 3 is told by its model_type or its experts."""
    whole = raw.get("config") or {}
    text, tokens = whole.get("text") or {}, whole.get("tokenizer") or {}
    version = 3 if raw.get("model_type") == "moondream3" or text.get("moe") else 2
    values = {new: text.get(old, default) for old, (new, default) in _KEYS.items()}
    given = text.get("moe") or {}
    moe = {key: given.get(key, default) for key, default in _EXPERTS.items()}
    moe |= {"num_experts": given.get("n_experts", moe["num_experts"])}
    moe |= {"experts_per_token": given.get("n_experts_per_tok", moe["experts_per_token"])}
    ends = {key: int(tokens.get(key, 0)) for key in ("bos_id", "eos_id")}
    return {
        **{key: value for key, value in raw.items() if key != "config"},
        **values,
        "max_position_embeddings": text.get("max_context", _CONTEXTS[version]),
        "rope_theta": float(text.get("rope_theta", _THETAS[version])),
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "group_size": text.get("group_size"),
        "moe": moe if version == 3 else None,
        "answer_token_id": int(tokens.get("answer_id", 3)),
        "bos_token_id": ends["bos_id"],
        "eos_token_id": ends["eos_id"],
    }


def moondream(c: Config) -> Decoder:
    """The token that starts an answer is never sampled."""
    c.refuse("group_size")
    dense, moe = Mlp(c.intermediate_size, "gelu_tanh", gated=False, bias=True), c.get("moe")
    extras = None
    if moe is not None:
        if c.num_key_value_heads != c.num_attention_heads:
            raise c.error("config", "text: n_kv_heads must be n_heads")
        extras = AttentionExtras(scaled_by_token=True)
        sparse = Moe(
            int(moe["num_experts"]),
            int(moe["experts_per_token"]),
            int(moe["expert_inner_dim"]),
            "gelu",
            score="softmax_topk",
            bias=True,
        )

    def ffn(i: int) -> Mlp | Moe:
        return dense if moe is None or i < moe["start_layer"] else sparse

    position = b.rope(c, b.head_dim(c), partial=True)
    mixer = b.attention(c, rope=position, qkv_bias=True, o_bias=True, extras=extras)
    return b.build_decoder(
        c,
        mixer,
        ffn,
        norm=Norm(c.layer_norm_eps, "layer", bias=True),
        layout="parallel",
        head_bias=True,
        suppressed_tokens=(int(c.answer_token_id),),
        names=_NAMES,
    )
