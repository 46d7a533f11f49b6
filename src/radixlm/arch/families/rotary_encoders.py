"""Encoders with rotary positions: ModernBERT, Nomic BERT, GTE, Jina v3, EuroBERT, RoFormer
and ESM."""

from __future__ import annotations

from typing import Any

from radixlm.arch.config import Config, is_number
from radixlm.arch.families import builders as b
from radixlm.arch.families.bert import bert_names, encoder
from radixlm.arch.names import AnyOf, Named, Names
from radixlm.arch.recipes import swapped_halves
from radixlm.arch.spec import Attention, Decoder, Encoder, Mlp, Norm, Rope, RopeScaling
from radixlm.base.record import replace


def modernbert(c: Config) -> Decoder:
    """Most layers have windows; the first has no norm before its attention."""
    norm = Norm(c.norm_eps, "layer", bias=c.norm_bias)
    every, thetas = (
        c.get("global_attn_every_n_layers", 3),
        ("global_rope_theta", "local_rope_theta"),
    )
    names: Names = {
        "embed": "model.embeddings.tok_embeddings",
        "embed_norm": "model.embeddings.norm",
        "norm": "model.final_norm",
        "norm1": AnyOf("model.layers.{i}.attn_norm", "model.layers.{i}.mlp_norm"),
        "norm2": "model.layers.{i}.mlp_norm",
        "mixer.qkv": "model.layers.{i}.attn.Wqkv",
        "mixer.o": "model.layers.{i}.attn.Wo",
        "ffn.up": "model.layers.{i}.mlp.Wi",
        "ffn.down": "model.layers.{i}.mlp.Wo",
    }

    def mixer(i: int) -> Attention:
        slides = b.is_sliding(c, i) if c.layer_types else bool(i % every)
        position = b.rope(c, b.head_dim(c), "sliding_attention" if slides else "full_attention")
        theta = c.get(thetas[slides])
        position = replace(position, theta=float(theta)) if theta else position
        span = c.local_attention // 2 + 1 if slides else 0
        return b.attention(
            c, rope=position, qkv_bias=c.attention_bias, o_bias=c.attention_bias, window=span
        )

    ffn = b.mlp(c, act="hidden_activation", bias=c.mlp_bias)
    decoder = encoder(c, names, mixer=mixer, ffn=ffn, norm=norm, offset=None, layout="pre")
    first = replace(decoder.blocks[0], layout="prenorm_ffn_only")
    return replace(decoder, blocks=(first, *decoder.blocks[1:]))


def rotary(c: Config, prefix: str, layer: str, names: Names, **parts: Any) -> Decoder:
    """BERT with rotary positions; ``names`` are those that differ."""
    tables = f"{prefix}.embeddings."
    named: Names = {
        "embed": tables + "word_embeddings",
        "types": tables + "token_type_embeddings",
        "embed_norm": tables + "LayerNorm",
        "norm1": layer + "norm1",
        "norm2": layer + "norm2",
        **names,
    }
    types = c.get("type_vocab_size", 0)
    return encoder(c, named, offset=None, token_types=types, **parts)


def nomic(c: Config) -> Decoder:
    """Config keys and names of the published checkpoints, which Hugging Face's class writes too."""
    c.refuse("prenorm", False)
    c.refuse("num_experts", 0)
    c.refuse("rotary_emb_interleaved", False)
    c.refuse("rotary_emb_fraction", 0, 1, 1.0)
    layer = "nomic_bert.encoder.layers.{i}."
    names: Names = {
        "embed_norm": "nomic_bert.emb_ln",
        "mixer.qkv": layer + "attn.Wqkv",
        "mixer.o": layer + "attn.out_proj",
        "ffn.up": (layer + "mlp.fc12", layer + "mlp.fc11"),
        "ffn.down": layer + "mlp.fc2",
    }
    position = b.rope(c, b.head_dim(c))
    theta = c.get("rotary_emb_base")
    mixer = b.attention(c, rope=replace(position, theta=float(theta)) if theta else position)
    act = "silu" if c.get("activation_function") == "swiglu" else b.activation(c)
    ffn = Mlp(c.get("n_inner") or c.intermediate_size, act)
    norm = Norm(c.get("layer_norm_epsilon") or c.layer_norm_eps, "layer", bias=True)
    return rotary(c, "nomic_bert", layer, names, mixer=mixer, ffn=ffn, norm=norm)


def ntk(position: Rope, factor: float) -> Rope:
    """A larger base and slower rotation by a fixed factor, as in the first GTE checkpoints."""
    slower = RopeScaling("linear", (("factor", factor ** (2 / position.dim)),))
    return replace(position, theta=position.theta * factor, scaling=slower)


def gte(c: Config) -> Decoder:
    prefix = gte_prefix(c)
    layer = prefix + ".encoder.layer.{i}."
    names: Names = {
        "mixer.qkv": layer + "attention.qkv_proj",
        "mixer.o": layer + "attention.o_proj",
        "norm1": layer + "attn_ln",
        "ffn.up": Named((layer + "mlp.up_gate_proj",), swapped_halves),
        "ffn.down": layer + "mlp.down_proj",
        "norm2": layer + "mlp_ln",
    }
    scaling = c.get("rope_scaling") or {}
    if (
        scaling.get("type") == "ntk"
        and is_number(scaling.get("factor"))
        and not scaling.get("mixed_b")
    ):
        position = ntk(Rope(b.head_dim(c), float(c.rope_theta)), float(scaling["factor"]))
    else:
        position = b.rope(c, b.head_dim(c))
    mixer = b.attention(c, rope=position, qkv_bias=True, o_bias=True)
    ffn = replace(b.mlp(c), down_bias=True)
    return rotary(c, prefix, layer, names, mixer=mixer, ffn=ffn)


def gte_prefix(c: Config) -> str:
    """The published checkpoints call the model "new"."""
    return "new" if c.architecture.startswith("New") else "gte"


def jina(c: Config) -> Decoder:
    layer = "roberta.encoder.layers.{i}."
    names: Names = {
        "embed_norm": "roberta.emb_ln",
        "mixer.qkv": layer + "mixer.Wqkv",
        "mixer.o": layer + "mixer.out_proj",
        "ffn.up1": layer + "mlp.fc1",
        "ffn.down": layer + "mlp.fc2",
    }
    return rotary(c, "roberta", layer, names, mixer=b.attention(c, qkv_bias=True, o_bias=True))


def eurobert(c: Config) -> Decoder:
    mixer = b.attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    decoder = b.build_decoder(c, mixer, b.mlp(c, bias=c.mlp_bias))
    return replace(decoder, encoder=Encoder(), norm=b.rms(c))


def esmc(c: Config) -> Decoder:
    """Proteins: Llama with layer norms, also of queries and keys, and weaker branches in deeper
    models."""
    bias, norm = c.attention_bias, Norm(1e-5, "layer")
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias, qk_norm="row", qk_norm_spec=norm)
    branch = (36 / c.num_hidden_layers) ** 0.5
    before, ffn = replace(norm, bias=True), b.mlp(c, bias=c.mlp_bias)
    decoder = b.build_decoder(c, mixer, ffn, before, residual=branch, final_norm=norm)
    return replace(decoder, encoder=Encoder())


def roformer(c: Config) -> Decoder:
    c.refuse("rotary_value", False)
    c.refuse("is_decoder", False)
    position, width = (
        Rope(b.head_dim(c), 10000.0, interleaved=True),
        c.embedding_size or c.hidden_size,
    )
    return encoder(
        c,
        bert_names("roformer"),
        mixer=b.attention(c, rope=position, qkv_bias=True, o_bias=True),
        offset=None,
        token_types=c.type_vocab_size,
        embed_dim=0 if width == c.hidden_size else width,
    )


def esm(c: Config) -> Decoder:
    """Proteins. Positions are rotary (ESM-2) or start after the padding token's id (ESM-1b)."""
    c.refuse("position_embedding_type", "absolute", "rotary")
    c.refuse("is_folding_model", False)
    c.refuse("is_decoder", False)
    layer = "esm.encoder.layer.{i}."
    names: Names = {
        **bert_names("esm"),
        "embed_norm": "esm.embeddings.layer_norm",
        "norm1": layer + "attention.LayerNorm",
        "norm2": layer + "LayerNorm",
        "norm": "esm.encoder.emb_layer_norm_after",
    }
    is_rotary = c.position_embedding_type == "rotary"
    position = Rope(b.head_dim(c), float(c.rope_theta)) if is_rotary else None
    decoder = encoder(
        c,
        names,
        mixer=b.attention(c, rope=position, qkv_bias=True, o_bias=True),
        ffn=Mlp(c.intermediate_size, "gelu", gated=False, bias=True),
        offset=None if is_rotary else c.pad_token_id + 1,
        layout="pre",
        dropped_token=c.mask_token_id if c.token_dropout else None,
    )
    return decoder if c.emb_layer_norm_before else replace(decoder, embed_norm=None)
