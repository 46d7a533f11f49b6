"""Whisper's decoder: every layer attends to the audio encoder's output."""

from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.families.builders import activation, attention, build_decoder
from radixlm.arch.names import AnyOf, Named
from radixlm.arch.recipes import ZeroRows
from radixlm.arch.spec import CrossAttention, Decoder, Mlp, Norm
from radixlm.base.record import replace


def whisper(c: Config) -> Decoder:
    """``media/config_json.py: flattened`` has put the decoder's keys at the top."""
    heads, dim = c.num_attention_heads, c.hidden_size
    size = c.divide("hidden_size", "num_attention_heads")
    own = attention(c, kv_heads=heads, head_dim=size, rope=None, qkv_bias=True, o_bias=True)
    act = activation(c, "activation_function")
    decoder = build_decoder(
        c,
        own,
        Mlp(c.intermediate_size, act, gated=False, bias=True),
        norm=Norm(1e-5, "layer", bias=True),
        positions=(c.max_position_embeddings, 0),
        names=_names(dim),
    )
    cross = CrossAttention(heads, heads, size, None, bias=True)
    blocks = tuple(replace(block, cross=cross) for block in decoder.blocks)
    return replace(decoder, blocks=blocks, tied=bool(c.tie_word_embeddings))


def _names(dim: int) -> dict[str, Any]:
    """Key projections have no biases: zeros are loaded."""
    top, layer = "model.decoder.", "model.decoder.layers.{i}."
    own, cross = layer + "self_attn.", layer + "encoder_attn."
    return {
        "embed": top + "embed_tokens",
        "positions": top + "embed_positions",
        "norm": top + "layer_norm",
        "head": AnyOf("proj_out", top + "embed_tokens"),
        "norm1": layer + "self_attn_layer_norm",
        "norm2": layer + "encoder_attn_layer_norm",
        "norm3": layer + "final_layer_norm",
        "mixer.qkv": tuple(f"{own}{part}_proj" for part in "qkv"),
        "mixer.qkv.bias": Named((own + "q_proj.bias", own + "v_proj.bias"), ZeroRows(dim, dim)),
        "mixer.o": own + "out_proj",
        "cross.q": cross + "q_proj",
        "cross.kv": (cross + "k_proj", cross + "v_proj"),
        "cross.kv.bias": Named((cross + "v_proj.bias",), ZeroRows(0, dim)),
        "cross.o": cross + "out_proj",
        "ffn.up1": layer + "fc1",
        "ffn.down": layer + "fc2",
    }
