"""xLSTM (arXiv:2405.04517): a matrix memory in every layer."""

from radixlm.arch.config import Config
from radixlm.arch.families.hybrid import stacked
from radixlm.arch.names import AnyOf, Names
from radixlm.arch.spec import Block, Decoder, MatrixLstm, Mlp, Norm

_BLOCK = "backbone.blocks.{i}."
_LAYER, _FFN = _BLOCK + "mlstm_layer.", _BLOCK + "ffn."
XLSTM: Names = {
    "embed": "backbone.embeddings",
    "norm": "backbone.out_norm",
    "norm1": _BLOCK + "norm_mlstm",
    "norm2": _BLOCK + "norm_ffn",
    "state.qkvo": AnyOf(
        (_LAYER + "q", _LAYER + "k", _LAYER + "v", _LAYER + "ogate_preact"),
        _LAYER + "qkv_opreact",
    ),
    "state.gates": AnyOf(
        (_LAYER + "igate_preact", _LAYER + "fgate_preact"), _LAYER + "ifgate_preact"
    ),
    "state.norm_weight": _LAYER + "multihead_norm.weight",
    "state.out": _LAYER + "out_proj",
    "ffn.up": AnyOf((_FFN + "proj_up_gate", _FFN + "proj_up"), _FFN + "proj_up_gate_z"),
    "ffn.down": _FFN + "proj_down",
}


def xlstm(c: Config) -> Decoder:
    c.refuse("use_bias", False)
    dim, heads = c.get("hidden_size") or c.embedding_dim, c.num_attention_heads
    keys, values = int(dim * c.qk_dim_factor), int(dim * c.v_dim_factor)
    for key, width in (("qk_dim_factor", keys), ("v_dim_factor", values)):
        if width < 1 or width % heads:
            raise c.error(key, f"gives {width} channels, which {heads} heads do not share")
    many = c.ffn_round_up_to_multiple_of
    inner = int((dim * c.ffn_proj_factor + many - 1) // many * many)
    norm = Norm(c.norm_eps)
    head_norm = Norm(c.norm_eps, "layer", affine=False)
    cap = float(c.gate_soft_cap or 0.0)
    mixer = MatrixLstm(heads, keys // heads, values // heads, head_norm, cap, c.eps)
    blocks = [Block(mixer, Mlp(inner, "silu"), norm)] * c.num_hidden_layers
    softcap = float(c.output_logit_soft_cap or 0.0)
    return stacked(c, blocks, norm, XLSTM, logit_softcap=softcap, tied=False)
