"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, family, is_sliding, plain, rms
from radixlm.arch.spec import Decoder


def slides(c: Config, layer: int) -> bool:
    """Layers from max_window_layers on slide, where use_sliding_window says so."""
    if not c.use_sliding_window or not c.sliding_window:
        return False
    if c.layer_types is not None:
        return is_sliding(c, layer)
    return bool(layer >= c.max_window_layers)


@family("Qwen2ForCausalLM")
def qwen2(c: Config) -> Decoder:
    return plain(
        c, lambda i: attention(c, qkv_bias=True, window=c.sliding_window if slides(c, i) else 0)
    )


@family("Qwen3ForCausalLM")
def qwen3(c: Config) -> Decoder:
    return plain(
        c,
        lambda i: attention(
            c,
            qkv_bias=c.attention_bias,
            o_bias=c.attention_bias,
            qk_norm="head",
            qk_norm_spec=rms(c),
            window=c.sliding_window if slides(c, i) else 0,
        ),
    )
