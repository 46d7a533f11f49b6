"""GGUF architectures with Mamba layers: Mamba 1 and 2, Falcon Mamba, Jamba, Falcon H1 and
Nemotron H."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.arch.families.gguf_hybrid import negative_logarithm, with_middle
from radixlm.arch.families.gguf_kind import (
    PRE,
    Change,
    Kind,
    Kinds,
    corrected_experts,
    experts,
    has,
    layers_with,
    rows_of,
)
from radixlm.arch.gguf import GgufHeader
from radixlm.base.errors import CheckpointError

_ENDS = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}


def scan(at: str, has_heads: bool) -> dict[str, str]:
    """The tensors of a Mamba 2 (``has_heads``) or 1."""
    return {
        "ssm_in": f"{at}.in_proj",
        "ssm_conv1d": f"{at}.conv1d",
        "ssm_x": f"{at}.x_proj",
        "ssm_dt": f"{at}.dt_bias" if has_heads else f"{at}.dt_proj",
        "ssm_a": f"{at}.A_log",
        "ssm_d": f"{at}.D",
        "ssm_norm": f"{at}.norm",
        "ssm_out": f"{at}.out_proj",
        **{f"ssm_{x}_norm": f"{at}.{x}_layernorm" for x in ("dt", "b", "c")},
    }


def _changes(_: GgufHeader) -> Mapping[str, Change]:
    return {"ssm_a": negative_logarithm, "ssm_conv1d.weight": with_middle}


def head_changes(_: GgufHeader) -> Mapping[str, Change]:
    """Of Mamba 2, whose numbers of a head are stored as columns."""

    def flat(value: Any) -> Any:
        return value.reshape(-1)

    a_log = {"ssm_a": lambda value: negative_logarithm(value).reshape(-1)}
    return {**a_log, "ssm_d": flat, "ssm_norm.weight": flat, "ssm_conv1d.weight": with_middle}


_SCAN = {"attn_norm": "norm", **scan("mixer", False)}
_HEADED_SCAN = {"attn_norm": "norm", **scan("mixer", True)}
PARALLEL = {
    **PRE,
    **scan("mamba", True),
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
}
_JAMBA = {
    **PARALLEL,
    **scan("mamba", False),
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{x}_exps": f"feed_forward.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
}
_NEMOTRON = {
    **_HEADED_SCAN,
    **{f"attn_{x}": f"mixer.{x}_proj" for x in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{x}": f"mixer.{x}_proj" for x in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{f"ffn_{x}_exps": f"mixer.experts.{{}}.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_shexp": f"mixer.shared_experts.{x}_proj" for x in ("up", "down")},
}


def _mamba(h: GgufHeader) -> Kind:
    """Falcon Mamba has norms inside, which the file has no numbers of."""
    is_falcon = bool(h.own("ssm.dt_b_c_rms"))
    more = {
        "hidden_act": "silu",
        "intermediate_size": h.count("ssm.inner_size"),
        "state_size": h.count("ssm.state_size"),
        "conv_kernel": h.count("ssm.conv_kernel"),
        "time_step_rank": h.count("ssm.time_step_rank"),
        "use_conv_bias": has(h, "ssm_conv1d.bias"),
        "use_bias": has(h, "ssm_in.bias"),
        "layer_norm_epsilon": h.own("attention.layer_norm_rms_epsilon", 1e-5),
        "mixer_rms_eps": 1e-6 if is_falcon else None,
    }
    return Kind(
        "FalconMambaForCausalLM" if is_falcon else "MambaForCausalLM",
        "falcon_mamba" if is_falcon else "mamba",
        _SCAN,
        more=lambda _: more,
        changes=_changes,
        prefix="backbone.layers.",
        ends=_ENDS,
    )


def _heads(h: GgufHeader) -> tuple[int, int]:
    """Heads of a Mamba 2, and their size."""
    heads, inner = h.count("ssm.time_step_rank"), h.count("ssm.inner_size")
    if inner % heads:
        raise CheckpointError(f"{h.path}: ssm.inner_size = {inner} is no multiple of {heads} heads")
    return heads, inner // heads


def _mamba2(h: GgufHeader) -> dict[str, Any]:
    heads, head_dim = _heads(h)
    return {
        "num_heads": heads,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "expand": heads * head_dim / h.count("embedding_length"),
        "state_size": h.count("ssm.state_size"),
        "n_groups": h.count("ssm.group_count", 1),
        "conv_kernel": h.count("ssm.conv_kernel"),
        "use_conv_bias": has(h, "ssm_conv1d.bias"),
        "use_bias": has(h, "ssm_in.bias"),
        "layer_norm_epsilon": h.own("attention.layer_norm_rms_epsilon", 1e-5),
    }


def prefixed_keys(h: GgufHeader) -> dict[str, Any]:
    """Keys of a Mamba 2 within a hybrid."""
    heads, head_dim = _heads(h)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": h.count("ssm.state_size"),
        "mamba_n_groups": h.count("ssm.group_count", 1),
        "mamba_d_conv": h.count("ssm.conv_kernel"),
        "mamba_expand": heads * head_dim // h.count("embedding_length"),
        "mamba_conv_bias": has(h, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(h, "ssm_in.bias"),
    }


def _falcon_h1(h: GgufHeader) -> dict[str, Any]:
    """The converter has multiplied all multipliers into the weights."""
    ones = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **prefixed_keys(h),
        "mamba_d_ssm": h.count("ssm.inner_size"),
        "mamba_rms_norm": has(h, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has(h, "ssm_out.bias"),
        **{f"{one}_multiplier": 1.0 for one in ones},
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


def _jamba(h: GgufHeader) -> dict[str, Any]:
    sparse = layers_with(h, "ffn_gate_inp.weight")
    at = [i for i, one in enumerate(sparse) if one]
    return {
        **experts(h),
        "layers_block_type": mixer_kinds(h, "mamba", "attention"),
        "expert_layer_offset": at[0] if at else len(sparse),
        "expert_layer_period": at[1] - at[0] if len(at) > 1 else len(sparse) + 1,
        "mamba_d_conv": h.count("ssm.conv_kernel"),
        "mamba_d_state": h.count("ssm.state_size"),
        "mamba_dt_rank": h.count("ssm.time_step_rank"),
        "mamba_expand": h.count("ssm.inner_size") // h.count("embedding_length"),
        "mamba_conv_bias": has(h, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(h, "ssm_in.bias"),
        "intermediate_size": rows_of(h, "ffn_up") or h.count("feed_forward_length"),
    }


def mixer_kinds(h: GgufHeader, state: str, attention: str) -> list[str]:
    return [attention if one else state for one in layers_with(h, "attn_k.weight")]


def _nemotron_h(h: GgufHeader) -> dict[str, Any]:
    heads, head_dim = _heads(h)
    parts = {"M": "ssm_in", "*": "attn_q", "E": "ffn_up_exps", "-": "ffn_up"}
    found = {mark: layers_with(h, f"{part}.weight") for mark, part in parts.items()}
    marks = ["".join(mark for mark in parts if found[mark][i]) for i in range(len(found["M"]))]
    if any(len(one) != 1 for one in marks):
        raise CheckpointError(f"{h.path}: a layer has not one branch: {marks}")
    eps = h.own("attention.layer_norm_rms_epsilon") or h.own("attention.layer_norm_epsilon")
    return {
        **(corrected_experts(h) if h.own("expert_count") else {}),
        "hybrid_override_pattern": "".join(marks),
        "intermediate_size": rows_of(h, "ffn_up"),
        "moe_shared_expert_intermediate_size": h.own("expert_shared_feed_forward_length"),
        "moe_latent_size": h.own("moe_latent_size"),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": h.count("ssm.state_size"),
        "n_groups": h.count("ssm.group_count", 1),
        "conv_kernel": h.count("ssm.conv_kernel"),
        "use_conv_bias": has(h, "ssm_conv1d.bias"),
        "use_bias": has(h, "ssm_in.bias"),
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": eps,
    }


KINDS: Kinds = {
    "mamba": _mamba,
    "mamba2": Kind(
        "Mamba2ForCausalLM",
        "mamba2",
        _HEADED_SCAN,
        more=_mamba2,
        changes=head_changes,
        prefix="backbone.layers.",
        ends=_ENDS,
    ),
    "jamba": Kind(
        "JambaForCausalLM",
        "jamba",
        _JAMBA,
        last_norm="model.final_layernorm",
        more=_jamba,
        changes=_changes,
    ),
    "falcon-h1": Kind(
        "FalconH1ForCausalLM",
        "falcon_h1",
        PARALLEL,
        last_norm="model.final_layernorm",
        more=_falcon_h1,
        changes=head_changes,
    ),
    **{
        name: Kind(
            "NemotronHForCausalLM",
            "nemotron_h",
            _NEMOTRON,
            more=_nemotron_h,
            changes=head_changes,
            prefix="backbone.layers.",
            ends=_ENDS,
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
}
