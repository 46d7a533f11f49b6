"""Mistral's own format: params.json as a config.json, and the names of the tensors beside it
(consolidated.safetensors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.config import Config
from radixlm.arch.names import DEFAULT, AnyOf, Names
from radixlm.arch.spec import Attention, Decoder
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace

HEAD_PROJECTION = "eagle_linear"
_LAYER = "layers.{i}."
_ATTENTION, _FEED, _SHARED = (_LAYER + part for part in ("attention.", "feed_forward.", "shared_"))
_EXPERT, _OLD_EXPERT = _LAYER + "experts.{e}.", _FEED + "experts.{e}."
_NAMES: Names = {
    "embed": "tok_embeddings",
    "norm": "norm",
    "head": "output",
    "norm1": _LAYER + "attention_norm",
    "norm2": _LAYER + "ffn_norm",
    "mixer.qkv": tuple(f"{_ATTENTION}w{one}" for one in "qkv"),
    "mixer.q": _ATTENTION + "wq",
    "mixer.q_a": _ATTENTION + "wq_a",
    "mixer.q_a_norm": _ATTENTION + "q_a_norm",
    "mixer.q_b": _ATTENTION + "wq_b",
    "mixer.kv_a": _ATTENTION + "wkv_a_with_mqa",
    "mixer.kv_a_norm": _ATTENTION + "kv_a_norm",
    "mixer.kv_b": _ATTENTION + "wkv_b",
    "mixer.o": _ATTENTION + "wo",
    "ffn.up": (_FEED + "w1", _FEED + "w3"),
    "ffn.down": _FEED + "w2",
    "moe.router": AnyOf(_LAYER + "gate", _FEED + "gate"),
    "moe.up": AnyOf(*((at + "w1", at + "w3") for at in (_EXPERT, _OLD_EXPERT))),
    "moe.down": AnyOf(_EXPERT + "w2", _OLD_EXPERT + "w2"),
    "moe.shared.up": (_SHARED + "experts.w1", _SHARED + "experts.w3"),
    "moe.shared.down": _SHARED + "experts.w2",
}
_KEYS = {  # of params.json -> of config.json
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_SAME = ("head_dim", "vocab_size", "max_position_embeddings", "model_max_length")
_OF_THE_WHOLE = ("torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}


def native(c: Config, decoder: Decoder) -> Decoder:
    """``decoder`` with the names and the interleaved rotation of Mistral's files, where the config
    was made of a params.json."""
    if not c.get("native_names"):
        return decoder

    def turned(mixer: Any) -> Any:
        if not isinstance(mixer, Attention) or mixer.rope is None:
            return mixer
        return replace(mixer, rope=replace(mixer.rope, interleaved=True))

    blocks = tuple(replace(block, mixer=turned(block.mixer)) for block in decoder.blocks)
    return replace(decoder, blocks=blocks, names=_NAMES)


def either(decoder: Decoder) -> Decoder:
    """``decoder`` with the names of Mistral's files beside its own."""
    own: Any = {**DEFAULT, **decoder.names}
    names = {role: AnyOf(name, own[role]) if role in own else name for role, name in _NAMES.items()}
    return replace(decoder, names={**decoder.names, **names})


def config_of(params: Mapping[str, Any], source: str, is_head: bool = False) -> dict[str, Any]:
    """config.json of the params.json at ``source``; ``is_head``: of an EAGLE head. CheckpointError
    for what is not known."""
    out: dict[str, Any] = {"native_names": True, "torch_dtype": "bfloat16", "eos_token_id": 2}
    out |= {"bos_token_id": 1, "max_position_embeddings": 128_000, "head_dim": None}
    out |= {new: params[old] for old, new in _KEYS.items() if params.get(old) is not None}
    out |= {key: params[key] for key in _SAME if params.get(key) is not None}
    architecture, out["model_type"] = _kind(params, out, is_head)
    out["architectures"] = [architecture]
    out["rope_parameters"] = _rope(params)
    out |= _window(params, out)
    quantization = params.get("quantization")
    if quantization:
        if quantization.get("qformat_weight") != "fp8_e4m3":
            raise CheckpointError(
                f"{source}: 'quantization' = {quantization!r} is not supported (must be fp8_e4m3)"
            )
        out["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    vision = params.get("vision_encoder")
    if not vision:
        return out
    whole = {key: out[key] for key in _OF_THE_WHOLE if key in out}
    token = {"image_token_id": int(vision.get("image_token_id", 10))}
    names = {"architectures": ["PixtralForConditionalGeneration"], "model_type": "pixtral"}
    return {**names, **whole, **token, "text_config": out, "vision_config": dict(vision)}


def _kind(params: Mapping[str, Any], out: dict[str, Any], is_head: bool) -> tuple[str, str]:
    """(architecture, model_type); puts the keys of attention and experts into ``out``."""
    moe = params.get("moe") or {}
    is_latent = params.get("kv_lora_rank") is not None
    if is_latent:
        out |= {key: params[key] for key in _LATENT if params.get(key) is not None}
        out |= {new: moe[old] for old, new in _MOE_KEYS.items() if moe.get(old) is not None}
        del out["head_dim"]
        if not moe:
            out["first_k_dense_replace"] = out.get("num_hidden_layers")
        return "MistralLarge3ForCausalLMEagle" if is_head else "Mistral4ForCausalLM", "mistral4"
    if moe:
        out |= {"num_local_experts": moe.get("num_experts")}
        out |= {"num_experts_per_tok": moe.get("num_experts_per_tok", 2)}
        return "MixtralForCausalLM", "mixtral"
    if is_head:
        return "MistralForCausalLMEagle", "mistral"
    if params.get("llama_4_scaling"):
        return "Ministral3ForCausalLM", "ministral3"
    return "MistralForCausalLM", "mistral"


def _rope(params: Mapping[str, Any]) -> dict[str, Any]:
    theta = params.get("rope_theta")
    if theta is None:  # as in Mistral's code
        theta = 1e6 if params.get("sliding_window") is None else 1e4
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(theta)}
    if yarn := params.get("yarn"):
        rope |= {"rope_type": "yarn", "factor": yarn["factor"]}
        rope["original_max_position_embeddings"] = yarn["original_max_position_embeddings"]
        rope |= {"beta_fast": yarn.get("beta", 32.0), "beta_slow": yarn.get("alpha", 1.0)}
        if not yarn.get("apply_scale", True):
            rope["attention_factor"] = 1.0
        elif params.get("kv_lora_rank") is not None:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if scaling := params.get("llama_4_scaling"):
        rope["llama_4_scaling_beta"] = scaling["beta"]
        rope["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return rope


def _window(params: Mapping[str, Any], out: Mapping[str, Any]) -> dict[str, Any]:
    """``sliding_window`` may list the windows of some layers, which the others repeat."""
    window = params.get("sliding_window")
    if not isinstance(window, list):
        return {"sliding_window": window}
    count = out.get("num_hidden_layers", 0)
    windows = (window * count)[:count]
    kinds = ["full_attention" if one is None else "sliding_attention" for one in windows]
    found: dict[str, Any] = {"sliding_window": next(filter(None, window), None)}
    if out["architectures"] == ["MistralForCausalLM"]:  # whose class has one window for all layers
        found |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
    return found | {"layer_types": kinds}
