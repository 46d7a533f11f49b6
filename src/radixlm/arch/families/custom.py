"""Models without a class in transformers, whose checkpoints come with code: Baichuan, BailingMoe,
ChatGLM, EXAONE 3, InternLM 1 and 2, MiMo, MiniCPM, Orion, Qwen 1, Xverse.

Each is a known block under other names; the tests rename a Hugging Face model into it.
"""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families import builders as b
from radixlm.arch.families.alibi import alibi_slopes
from radixlm.arch.families.llama import llama
from radixlm.arch.families.published import xverse_moe
from radixlm.arch.names import LAYER, AnyOf, Named, Names
from radixlm.arch.recipes import GroupedQkv, NormalizeRows
from radixlm.arch.spec import Attention, AttentionExtras, Decoder, Mlp, Moe, Norm, Rope
from radixlm.base.record import replace

_H = "transformer.h.{i}."


def xverse(c: Config) -> Decoder:
    return b.build_decoder(c) if c.get("num_experts") is None else xverse_moe(c)


def orion(c: Config) -> Decoder:
    bias, norm = c.attention_bias, Norm(c.rms_norm_eps, "layer", bias=True)
    return b.build_decoder(c, b.attention(c, qkv_bias=bias, o_bias=bias), norm=norm)


def mimo(c: Config) -> Decoder:
    return b.build_decoder(c, b.attention(c, qkv_bias=c.attention_bias))


def internlm(c: Config) -> Decoder:
    bias = c.get("bias", True)
    return b.build_decoder(c, b.attention(c, qkv_bias=bias, o_bias=bias))


def internlm2(c: Config) -> Decoder:
    layer, bias = "model.layers.{i}.", c.get("bias", False)
    mixer = b.attention(c, qkv_bias=bias, o_bias=bias)
    grouped = GroupedQkv(mixer.kv_heads, mixer.head_dim)
    names: Names = {
        "embed": "model.tok_embeddings",
        "head": "output",
        "norm1": layer + "attention_norm",
        "norm2": layer + "ffn_norm",
        "mixer.qkv": Named((layer + "attention.wqkv",), grouped),
        "mixer.o": layer + "attention.wo",
        "ffn.up": (layer + "feed_forward.w1", layer + "feed_forward.w3"),
        "ffn.down": layer + "feed_forward.w2",
    }
    return b.build_decoder(c, mixer, names=names)


def minicpm(c: Config) -> Decoder:
    return minicpm_scales(c, llama(c))


def minicpm_scales(c: Config, described: Decoder) -> Decoder:
    """With the scales of embeddings, branches and logits."""
    residual = c.get("scale_depth", 1.0) / c.num_hidden_layers**0.5
    return replace(
        described,
        blocks=tuple(replace(block, residual=residual) for block in described.blocks),
        embed_scale=float(c.get("scale_emb", 1.0)),
        logit_scale=c.get("dim_model_base", 1) / c.hidden_size,
    )


def baichuan(c: Config) -> Decoder:
    names: Names = {"mixer.qkv": LAYER + "self_attn.W_pack"}
    if c.vocab_size == 125696:  # the second generation multiplies by unit rows
        names = {**names, "head": Named(("lm_head",), NormalizeRows())}
    if c.is_explicit("max_position_embeddings"):
        return b.build_decoder(c, names=names)
    extras = AttentionExtras(
        alibi_slopes=alibi_slopes(c.num_attention_heads)
    )  # the 13B checkpoints
    described = b.build_decoder(c, b.attention(c, rope=None, extras=extras), names=names)
    return replace(described, max_positions=c.get("model_max_length", c.max_position_embeddings))


def exaone(c: Config) -> Decoder:
    attn = _H + "attn.attention."
    return b.build_decoder(
        c,
        ffn=b.mlp(c, act="activation_function"),
        norm=Norm(c.layer_norm_epsilon),
        names={
            "embed": "transformer.wte",
            "norm": "transformer.ln_f",
            "norm1": _H + "ln_1",
            "norm2": _H + "ln_2",
            "mixer.qkv": tuple(f"{attn}{part}_proj" for part in "qkv"),
            "mixer.o": attn + "out_proj",
            "ffn.up": (_H + "mlp.c_fc_0", _H + "mlp.c_fc_1"),
            "ffn.down": _H + "mlp.c_proj",
        },
    )


def qwen1(c: Config) -> Decoder:
    bias, dim = not c.get("no_bias", True), c.get("kv_channels") or b.head_dim(c)
    position = Rope(int(dim * c.get("rotary_pct", 1.0)), float(c.get("rotary_emb_base", 10000)))
    described = b.build_decoder(
        c,
        b.attention(c, head_dim=dim, rope=position, qkv_bias=True, o_bias=bias),
        Mlp(c.intermediate_size // 2, "silu", bias=bias),
        norm=Norm(c.layer_norm_epsilon),
        names={
            "embed": "transformer.wte",
            "norm": "transformer.ln_f",
            "norm1": _H + "ln_1",
            "norm2": _H + "ln_2",
            "mixer.qkv": _H + "attn.c_attn",
            "mixer.o": _H + "attn.c_proj",
            "ffn.up": (_H + "mlp.w2", _H + "mlp.w1"),  # w2 is the gate
            "ffn.down": _H + "mlp.c_proj",
        },
    )
    # Longer texts would need its dynamic base and log(n) scaling of queries.
    return replace(described, max_positions=c.get("seq_length", c.max_position_embeddings))


def chatglm(c: Config) -> Decoder:
    c.refuse("rmsnorm", True)
    c.refuse("apply_residual_connection_post_layernorm", False)
    c.refuse("post_layer_norm", True)
    c.refuse("add_bias_linear", False)
    layer, top = "transformer.encoder.layers.{i}.", "transformer.encoder."
    dim = c.get("kv_channels", 128)
    kv_heads = c.multi_query_group_num if c.get("multi_query_attention") else None
    position = Rope(dim // 2, 10000.0 * c.get("rope_ratio", 1), interleaved=True)
    return b.build_decoder(
        c,
        b.attention(
            c,
            kv_heads=kv_heads or c.num_attention_heads,
            head_dim=dim,
            rope=position,
            qkv_bias=c.get("add_qkv_bias", False),
        ),
        Mlp(c.ffn_hidden_size, "silu"),
        norm=Norm(c.get("layernorm_epsilon", 1e-5)),
        names={
            "embed": "transformer.embedding.word_embeddings",
            "norm": top + "final_layernorm",
            "head": "transformer.output_layer",
            "norm1": layer + "input_layernorm",
            "norm2": layer + "post_attention_layernorm",
            "mixer.qkv": layer + "self_attention.query_key_value",
            "mixer.o": layer + "self_attention.dense",
            "ffn.up": layer + "mlp.dense_h_to_4h",
            "ffn.down": layer + "mlp.dense_4h_to_h",
        },
    )


def glm4v(c: Config) -> Decoder:
    """ChatGLM beside an image encoder (``media/layouts/glm4v.py``). All tokens of an image have one
    position, so that the sections of M-RoPE are alike."""
    described = chatglm(c)
    blocks = []
    for block in described.blocks:
        assert isinstance(block.mixer, Attention) and block.mixer.rope is not None
        part, rest = divmod(block.mixer.rope.dim // 2, 3)
        rope = replace(block.mixer.rope, mrope_sections=(part + rest, part, part))
        blocks.append(replace(block, mixer=replace(block.mixer, rope=rope)))
    return replace(described, blocks=tuple(blocks))


def bailing_names(c: Config) -> Names:
    head: Names = {"head": Named(("lm_head",), NormalizeRows())} if c.get("norm_head") else {}
    return {
        **head,
        "embed": "model.word_embeddings",
        "mixer.qkv": LAYER + "attention.query_key_value",
        "mixer.o": LAYER + "attention.dense",
        "mixer.q_norm": LAYER + "attention.query_layernorm",
        "mixer.k_norm": LAYER + "attention.key_layernorm",
        "moe.correction": AnyOf(
            LAYER + "mlp.gate.expert_bias", LAYER + "mlp.gate.e_score_correction_bias"
        ),
    }


def bailing_moe(c: Config) -> Decoder:
    shared = c.moe_intermediate_size * c.get("num_shared_experts", 0)
    sparse = b.moe(
        c,
        renorm=c.get("norm_topk_prob", True),
        shared=Mlp(shared, b.activation(c)) if shared else None,
    )
    bias, first = c.get("use_bias", False), c.get("first_k_dense_replace", 0)

    def ffn(i: int) -> b.Ffn:
        return b.mlp(c) if i < first else sparse

    mixer = b.attention(c, qkv_bias=c.get("use_qkv_bias", False), o_bias=bias)
    return b.build_decoder(c, mixer, ffn, names=bailing_names(c))


def bailing_experts(c: Config) -> Moe:
    """The experts of Bailing MoE 2 and 2.5."""
    inner = c.get("moe_shared_expert_intermediate_size", c.moe_intermediate_size)
    shared = inner * c.get("num_shared_experts", 0)
    return b.moe(
        c,
        score=c.get("score_function", "sigmoid"),
        correction=c.get("moe_router_enable_expert_bias", True),
        renorm=c.get("norm_topk_prob", True),
        scale=c.get("routed_scaling_factor", 1.0),
        groups=(c.get("n_group", 1), c.get("topk_group", 1)),
        shared=Mlp(shared, b.activation(c)) if shared else None,
    )


def bailing_moe_v2(c: Config) -> Decoder:
    sparse, is_normed = bailing_experts(c), c.get("use_qk_norm", True)
    mixer = b.attention(
        c,
        rope=b.rope(c, b.head_dim(c), partial=True),
        qkv_bias=c.get("use_qkv_bias", False),
        o_bias=c.get("use_bias", False),
        qk_norm="head" if is_normed else "",
        qk_norm_spec=b.rms(c) if is_normed else None,
    )
    first = c.get("first_k_dense_replace", 0)
    return b.build_decoder(
        c, mixer, lambda i: b.mlp(c) if i < first else sparse, names=bailing_names(c)
    )
