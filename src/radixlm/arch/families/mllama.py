"""Llama 3.2 Vision: some layers attend to the image encoder's output and not to the text."""

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, build_decoder, mlp, rms
from radixlm.arch.names import LAYER, Names
from radixlm.arch.spec import Block, CrossAttention, Decoder
from radixlm.base.record import replace

_CROSS = LAYER + "cross_attn."
NAMES: Names = {
    "cross.q": _CROSS + "q_proj",
    "cross.kv": (_CROSS + "k_proj", _CROSS + "v_proj"),
    "cross.o": _CROSS + "o_proj",
    "cross.q_norm": _CROSS + "q_norm",
    "cross.k_norm": _CROSS + "k_norm",
    "block.cross_gate": LAYER + "cross_attn_attn_gate",
    "block.ffn_gate": LAYER + "cross_attn_mlp_gate",
}
# <|image|> and further special tokens have embeddings behind the vocabulary
NUM_EXTRA_ROWS = 8


def mllama(c: Config) -> Decoder:
    mixer = attention(c)
    decoder = build_decoder(c, mixer, mlp(c), names=NAMES, extra_vocab_rows=NUM_EXTRA_ROWS)
    layers = c.cross_attention_layers
    if not isinstance(layers, list) or not all(0 <= i < c.num_hidden_layers for i in layers):
        raise c.error("cross_attention_layers", f"= {layers!r} must be a list of layers")
    cross = CrossAttention(mixer.heads, mixer.kv_heads, mixer.head_dim, rms(c))
    blocks = tuple(
        Block(cross, block.ffn, block.norm, "gated_cross") if i in layers else block
        for i, block in enumerate(decoder.blocks)
    )
    return replace(decoder, blocks=blocks, tied=False)
