"""HRM (arXiv:2506.21734): two stacks of gated blocks that run again and again over two streams."""

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, build_decoder, head_dim, mlp
from radixlm.arch.names import AnyOf, Named, Names
from radixlm.arch.recipes import GroupedParts
from radixlm.arch.spec import AttentionExtras, Decoder, HierarchicalRecurrence, Norm

_LAYER = "model.{stack}.layers.{i}."
_OURS, _THEIRS, _MLP = _LAYER + "self_attn.", _LAYER + "attn.", _LAYER + "mlp."


def hrm_text(c: Config) -> Decoder:
    """Prompts are causal, as without token types. num_hidden_layers is that of one stack unless
    num_layers_per_stack is given."""
    size, heads = c.num_layers_per_stack or c.num_hidden_layers, c.num_attention_heads
    bias = c.attention_bias
    for key in ("H_cycles", "L_cycles"):
        if not isinstance(c.get(key), int) or not 1 <= c.get(key) <= 64:
            raise c.error(key, f"= {c.get(key)!r} must be a small positive integer")
    cycles = HierarchicalRecurrence(c.H_cycles, c.L_cycles, size, ("L_module", "H_module"))
    rows, fused = heads * head_dim(c), (_THEIRS + "gqkv_proj",)
    norm, gated = (
        Norm(c.rms_norm_eps, affine=False),
        AttentionExtras(gate="channel", gate_bias=bias),
    )
    names: Names = {
        "cycles.start": "model.z_L_init",
        "mixer.gate": AnyOf(
            Named(fused, GroupedParts(1, (rows, 3 * rows), (0,))), _OURS + "gate_proj"
        ),
        "mixer.qkv": AnyOf(
            Named(fused, GroupedParts(1, (rows, 3 * rows), (1,))),
            tuple(f"{_OURS}{one}_proj" for one in "qkv"),
        ),
        "mixer.o": AnyOf(_THEIRS + "o_proj", _OURS + "o_proj"),
        "ffn.up": AnyOf(_MLP + "gate_up_proj", (_MLP + "gate_proj", _MLP + "up_proj")),
        "ffn.down": _MLP + "down_proj",
    }
    return build_decoder(
        c.replace(num_hidden_layers=size * len(cycles.runs)),
        attention(c, kv_heads=heads, qkv_bias=bias, o_bias=bias, extras=gated),
        mlp(c, bias=c.mlp_bias),
        norm,
        embed_scale=float(c.embedding_scale or 1.0 / c.initializer_range),
        cycles=cycles,
        names=names,
    )
