"""GLM 4 (arXiv:2406.12793), GLM 4 MoE and Solar Open: half of each head is rotated, gate and up are
stored fused."""

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, build_decoder, head_dim, rms, rope
from radixlm.arch.families.deepseek import latent, routed
from radixlm.arch.names import FUSED_UP, LAYER
from radixlm.arch.spec import Decoder
from radixlm.base.record import replace


def glm(c: Config) -> Decoder:
    position = rope(c, head_dim(c), partial=True, interleaved=True)
    mixer = attention(c, rope=position, qkv_bias=c.attention_bias)
    return build_decoder(c, mixer, names={"ffn.up": FUSED_UP})


def glm4(c: Config) -> Decoder:
    described = glm(c)
    names = {
        "ffn.up": FUSED_UP,
        "norm2": LAYER + "post_self_attn_layernorm",
        "norm3": LAYER + "post_attention_layernorm",
        "norm4": LAYER + "post_mlp_layernorm",
    }
    blocks = tuple(replace(block, layout="sandwich") for block in described.blocks)
    return replace(described, blocks=blocks, names=names)


def glm4_moe(c: Config) -> Decoder:
    mixer = attention(
        c,
        rope=rope(c, head_dim(c), partial=True),
        qkv_bias=c.attention_bias,
        qk_norm="head" if c.use_qk_norm else "",
        qk_norm_spec=rms(c) if c.use_qk_norm else None,
    )
    return build_decoder(c, mixer, routed(c, score="sigmoid", correction=True))


def glm4_moe_lite(c: Config) -> Decoder:
    kinds = c.mlp_layer_types
    dense = kinds.count("dense") if kinds else 1
    if kinds and kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise c.error("mlp_layer_types", "must be dense layers, then sparse ones")
    ffn = routed(c, first=dense, score="sigmoid", correction=True)
    return build_decoder(c, latent(c, interleaved=c.rope_interleave), ffn)


def solar_open(c: Config) -> Decoder:
    mixer = attention(c, qkv_bias=c.attention_bias)
    return build_decoder(c, mixer, routed(c, first=0, score="sigmoid", correction=True))
