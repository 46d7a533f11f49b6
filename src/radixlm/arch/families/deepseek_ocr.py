"""DeepSeek-OCR: the experts of DeepSeek V2 with plain attention."""

from radixlm.arch.config import Config
from radixlm.arch.families.builders import attention, build_decoder, mlp
from radixlm.arch.families.deepseek import routed
from radixlm.arch.names import untied
from radixlm.arch.spec import Decoder


def deepseek_ocr(c: Config) -> Decoder:
    c.refuse("topk_method", "greedy", "group_limited_greedy")
    groups = (c.n_group, c.topk_group) if c.topk_method == "group_limited_greedy" else (1, 1)
    kinds, dense = c.get("mlp_layer_types"), mlp(c, bias=c.mlp_bias)
    by_layer = routed(c, groups=groups, group_score="max", renorm=False, bias=c.mlp_bias)
    mixer = attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
    if kinds is not None:
        sparse = by_layer(c.num_hidden_layers)
        decoder = build_decoder(c, mixer, lambda i: sparse if kinds[i] == "sparse" else dense)
    else:
        decoder = build_decoder(c, mixer, by_layer)
    return decoder if decoder.tied else untied(decoder)  # the whole model may tie it
