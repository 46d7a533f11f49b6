"""Chameleon: images are tokens of its own vocabulary, made by a VQ-VAE."""

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, build_decoder, mlp
from radixlm.arch.names import LAYER
from radixlm.arch.spec import Decoder, Norm


def chameleon(c: Config) -> Decoder:
    """LayerNorms on queries and keys, one a head; image tokens are read and never sampled."""
    bias, norm = c.attention_bias, Norm(1e-5, "layer", bias=True)
    mixer = attention(c, qkv_bias=bias, o_bias=bias, qk_norm="each", qk_norm_spec=norm)
    words = (c.get("vocabulary_map") or {}).items()
    post_norms = {"norm1": LAYER + "input_layernorm", "norm2": LAYER + "post_attention_layernorm"}
    return build_decoder(
        c,
        mixer,
        mlp(c, bias=bool(c.get("mlp_bias"))),
        layout="post" if c.swin_norm else "pre",
        suppressed_tokens=tuple(
            sorted(token for word, token in words if word.startswith("IMGIMG"))
        ),
        names=post_norms if c.swin_norm else None,
    )
