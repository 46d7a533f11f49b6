"""Mistral Large 4: latent attention to tokens that an indexer chooses by the hidden states, layers
without rotation, learned frequencies, and latents that later layers borrow."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.deepseek import latent, routed, shared_choices
from radixlm.arch.families.sparse_attention import kinds_of, positive
from radixlm.arch.names import LAYER, AnyOf, Names
from radixlm.arch.spec import Decoder, Indexer, LatentAttention, Norm
from radixlm.base.record import replace


def _layer(*parts: str) -> AnyOf:
    """A tensor of a layer under any of these names; the published checkpoint is Mistral's own."""
    return AnyOf(*(at + part for at in (LAYER, "layers.{i}.") for part in parts))


def _attention(own: str, usual: str) -> AnyOf:
    return _layer("attention." + own, "attention." + usual, "self_attn." + usual)


def _joined(at: str, *ways: tuple[str, str]) -> AnyOf:
    """The gate and the up projection."""
    layers = (LAYER + at, "layers.{i}." + at)
    return AnyOf(*((layer + gate, layer + up) for layer in layers for gate, up in ways))


_SPLIT, _OWN = ("gate_proj", "up_proj"), ("w1", "w3")
_NAMES: Names = {
    "embed": AnyOf("model.embed_tokens", "tok_embeddings"),
    "norm": AnyOf("model.norm", "norm"),
    "head": AnyOf("lm_head", "output"),
    "frequencies.logs": AnyOf("model.rotary_emb.alpha", "lerope.alpha"),
    "norm1": _layer("attention_norm", "input_layernorm"),
    "norm2": _layer("ffn_norm", "post_attention_layernorm"),
    "mixer.q": _attention("wq", "q_proj"),
    "mixer.kv_a": _attention("wkv_a_with_mqa", "kv_a_proj_with_mqa"),
    "mixer.kv_a_norm": _attention("kv_a_norm", "kv_a_layernorm"),
    "mixer.kv_b": _attention("wkv_b", "kv_b_proj"),
    "mixer.o": _attention("wo", "o_proj"),
    "mixer.log_scaling.scale": _attention("ssmax_scaling.s", "softmax_scaling.scale"),
    "mixer.log_scaling.bias": _attention("ssmax_scaling.b", "softmax_scaling.bias"),
    **{
        f"mixer.index.{role}": _attention(f"indexer.{part}", f"indexer.{part}")
        for role, part in (
            *(("q", "wq_b"), ("q_norm", "q_input_norm")),
            *(("k", "wk"), ("k_norm", "k_norm"), ("weights", "weights_proj")),
        )
    },
    "mixer.index.log_scaling.scale": _attention(
        "indexer.ssmax_scaling.s", "indexer.softmax_scaling.scale"
    ),
    "mixer.index.log_scaling.bias": _attention(
        "indexer.ssmax_scaling.b", "indexer.softmax_scaling.bias"
    ),
    "ffn.up": AnyOf(*(_joined(at, _OWN, _SPLIT) for at in ("feed_forward.", "mlp."))),
    "ffn.down": _layer("feed_forward.w2", "feed_forward.down_proj", "mlp.down_proj"),
    "moe.router": _layer("gate", "mlp.gate"),
    "moe.up": AnyOf(
        _joined("experts.{e}.", _OWN),
        LAYER + "mlp.experts.gate_up_proj",
    ),
    "moe.down": AnyOf(_layer("experts.{e}.w2"), LAYER + "mlp.experts.down_proj"),
    "moe.shared.up": AnyOf(*(_joined(at + "shared_experts.", _OWN, _SPLIT) for at in ("", "mlp."))),
    "moe.shared.down": _layer(
        "shared_experts.w2", "shared_experts.down_proj", "mlp.shared_experts.down_proj"
    ),
}


def mistral_large4_config(raw: dict[str, Any]) -> dict[str, Any]:
    """With the lists that the class works out from other keys."""
    out, count = dict(raw), raw.get("num_hidden_layers", 72)
    if out.get("no_rope_layers") is None:
        every = raw.get("no_rope_layer_interval", 4)
        out["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(count)]
    if out.get("kv_source_layers") is None:
        out["kv_source_layers"] = list(range(count))
    if out.get("mlp_layer_types") is None:
        first = raw.get("first_k_dense_replace", 1)
        out["mlp_layer_types"] = ["dense" if i < first else "sparse" for i in range(count)]
    return out


def mistral_large4(c: Config) -> Decoder:
    """In no_rope_layers, 1 stands for a layer with rotation."""
    positive(c, "index_n_heads", "index_head_dim", "index_topk", "qk_rope_head_dim")
    if c.index_head_dim < c.qk_rope_head_dim:
        raise c.error("index_head_dim", "must hold 'qk_rope_head_dim'")
    rotated = replace(
        latent(c.replace(q_lora_rank=0), interleaved=True), norm=b.rms(c), log_scaling=True
    )
    if rotated.rope is None or rotated.rope.depends_on_length:
        raise c.error("rope_parameters", "must not depend on the length: frequencies are learned")
    rotated = replace(rotated, rope=replace(rotated.rope, learned=True))
    still = replace(
        rotated, rope=None, rope_dim=0, nope_dim=c.qk_nope_head_dim + c.qk_rope_head_dim
    )
    norm = Norm(1e-6, "layer", bias=True)
    index = Indexer(
        c.index_n_heads, c.index_head_dim, c.index_topk, True, norm, input_norm=norm,
        log_scaling=True,
    )  # fmt: skip
    shares, sources = shared_choices(c), _sources(c)

    def mixer(i: int) -> LatentAttention:
        lends = i in sources[i + 1 :]
        return replace(
            rotated if c.no_rope_layers[i] else still,
            indexer=replace(index, is_shared=shares(i)),
            latents="borrows" if sources[i] != i else "keeps" if lends else "own",
        )

    kinds, ffn = kinds_of(c, "mlp_layer_types", "dense", "sparse"), routed(c, 0, renorm=True)
    return b.build_decoder(
        c,
        mixer,
        lambda i: ffn(i) if kinds[i] == "sparse" else b.mlp(c),
        names=_NAMES,
        logit_softcap=c.final_logit_softcapping,
    )


def _sources(c: Config) -> list[int]:
    """The layer whose latents each layer reads: itself, or the last one before it that lends to any
    and rotates as many channels."""
    sources, rotates = c.kv_source_layers, c.no_rope_layers
    for key in ("kv_source_layers", "no_rope_layers"):
        if not isinstance(c.get(key), list) or len(c.get(key)) < c.num_hidden_layers:
            raise c.error(key, f"must have an entry for each of the {c.num_hidden_layers} layers")
    lent: dict[bool, int] = {}
    for i, source in enumerate(sources):
        if source == i:
            if i in sources[i + 1 :]:
                lent[bool(rotates[i])] = i
        elif lent.get(bool(rotates[i])) != source:
            raise c.error("kv_source_layers", f"gives layer {i} the latents of layer {source!r}")
    return list(sources)
