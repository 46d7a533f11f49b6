"""Tiny random Hugging Face models of every architecture, and the comparison with the eager
driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from radixlm.arch.hf import describe
from radixlm.arch.names import is_ignorable
from tests.arch.eager import Runner
from tests.fakes.shapes import EXPERTS, LATENT, ROUTED, WIDE

transformers.utils.logging.disable_progress_bar()

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"head_dim": 24, "sliding_window": 4}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}

_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

# architecture -> changes to TINY
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "MistralForCausalLM": _SLIDING,
    "MinistralForCausalLM": _SLIDING,
    "ArceeForCausalLM": {},
    "SeedOssForCausalLM": WIDE,
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": WIDE,
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "Qwen3MoeForCausalLM": {**EXPERTS, **WIDE, "norm_topk_prob": True},
    "Ernie4_5ForCausalLM": WIDE,
    "GlmForCausalLM": WIDE,
    "Glm4ForCausalLM": WIDE,
    "Glm4MoeForCausalLM": {**ROUTED, "head_dim": 16, "use_qk_norm": True},
    "Phi3ForCausalLM": {},
    "PhiForCausalLM": {},
    "GraniteForCausalLM": _GRANITE,
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {"sliding_window": 4, "num_hidden_layers": 4},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2},
    "Exaone4ForCausalLM": {**_SLIDING, "num_hidden_layers": 4},
    "GemmaForCausalLM": WIDE,
    "Gemma2ForCausalLM": _SLIDING,
    "Gemma3ForCausalLM": {**_SLIDING, "num_hidden_layers": 6},
    "CohereForCausalLM": {"use_qk_norm": True},
    "Cohere2ForCausalLM": {"sliding_window": 4, "num_hidden_layers": 4},
    "StableLmForCausalLM": {"qk_layernorm": True},
    "Starcoder2ForCausalLM": {"sliding_window": 4},
    "NemotronForCausalLM": {},
    "GPTNeoXForCausalLM": {"num_key_value_heads": None},
    "FalconForCausalLM": {
        "num_key_value_heads": None,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
    },
    "GPT2LMHeadModel": _GPT,
    "OPTForCausalLM": {"ffn_dim": 96, "num_key_value_heads": None},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "DeepseekV2ForCausalLM": {
        **LATENT,
        **ROUTED,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "DeepseekV3ForCausalLM": {**LATENT, **ROUTED, "n_group": 4, "topk_group": 2},
    "Dots1ForCausalLM": {**ROUTED, "head_dim": 16},
    "GptOssForCausalLM": {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "HeliumForCausalLM": {"head_dim": 16, "attention_bias": True},
    "Jais2ForCausalLM": {},
    "VaultGemmaForCausalLM": _SLIDING,
    "FlexOlmoForCausalLM": {"num_experts": 6, "num_experts_per_tok": 2},
    "MiniMaxM2ForCausalLM": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "HyperCLOVAXForCausalLM": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "YoutuForCausalLM": LATENT,
    "Glm4MoeLiteForCausalLM": {**LATENT, **ROUTED, "first_k_dense_replace": None},
    "GPTNeoForCausalLM": {
        "num_heads": 4,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
        "num_attention_heads": None,
        "num_hidden_layers": None,
        "num_key_value_heads": None,
    },
    "BioGptForCausalLM": {"num_key_value_heads": None},
    "SolarOpenForCausalLM": {**ROUTED, "head_dim": 16},
    "ExaoneMoeForCausalLM": {
        **EXPERTS,
        **_SLIDING,
        "num_hidden_layers": 4,
        "num_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "MiniCPM3ForCausalLM": LATENT,
    "MellumForCausalLM": {
        **EXPERTS,
        **_SLIDING,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "GraniteMoeForCausalLM": {**_GRANITE, "num_local_experts": 4},
    "GraniteMoeSharedForCausalLM": {
        **_GRANITE,
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
    },
    "GraniteSWAForCausalLM": {
        **_GRANITE,
        "sliding_window": 4,
        "layer_rope_theta": [0, 10000.0, 5000.0],
    },
    "GraniteMoeSWAForCausalLM": {
        **_GRANITE,
        "num_local_experts": 4,
        "sliding_window": 4,
        "shared_intermediate_size": 40,
    },
    "CwmForCausalLM": _SLIDING,
    "AfmoeForCausalLM": {**EXPERTS, **_SLIDING, "mup_enabled": True, "num_hidden_layers": 4},
    "Cohere2MoeForCausalLM": {
        "num_experts": 6,
        "head_dim": 16,
        "sliding_window": 4,
        "num_shared_experts": 1,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 48,
    },
    "CodeGenForCausalLM": {**_GPT, "rotary_dim": 8},
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 8},
    "GPTBigCodeForCausalLM": _GPT,
    "PersimmonForCausalLM": {"num_key_value_heads": None},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
}


# Further names of the same families.
ALIASES = {
    *("AquilaModel", "LLaMAForCausalLM", "TeleChat3ForCausalLM"),
    *("BaiChuanForCausalLM", "BailingMoEForCausalLM", "ChatGLMForConditionalGeneration"),
    *("Ernie4_5_ForCausalLM", "Ernie4_5_MoEForCausalLM", "ExaoneMoEForCausalLM"),
    *("IQuestCoderForCausalLM", "MPTForCausalLM", "PhiMoEForCausalLM"),
    "MistralLarge3ForCausalLM",
    *("Llama4ForConditionalGeneration", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    "MiniMaxM3SparseForCausalLM",
    *("MuseGlimmerForCausalLM", "MuseSparkForCausalLM", "Step3p5ForCausalLM"),
    "InklingForConditionalGeneration",
    *("QuantMixtralForCausalLM", "TorchNativeLlamaForCausalLM", "TorchNativePhi3ForCausalLM"),
}


def make(architecture: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """A random model of the architecture, saved to `folder`; returns it.

    A change to None removes the key from the config, a change to "null" sets it to None.
    """
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture)
    settings = {**TINY, **TINY_CONFIGS.get(architecture, {}), **changes}
    given = {k: None if v == "null" else v for k, v in settings.items() if v is not None}
    config = cls.config_class(**given)
    config._attn_implementation = "eager"
    model = cls(config).eval()
    buffers = [b for name, b in model.named_buffers() if "correction" in name]
    for p in [*model.parameters(), *buffers]:
        p.data.normal_(0, 0.08) if p.dim() > 1 else p.data.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return model


def compare(model: Any, folder: Path, length: int = 12) -> tuple[float, list[str], float]:
    """(relative error of the logits, unused tensors, the error with one changed weight)."""
    decoder = describe(folder)
    tensors = load_file(folder / "model.safetensors")
    ids = torch.randint(3, 120, (length,))
    with torch.no_grad():
        theirs = model(ids[None]).logits[0].float()
        runner = Runner(decoder, tensors)
        ours = runner(ids)
        left = sorted(n for n in runner.w.unused if not is_ignorable(n, decoder))
        name = next(n for n in tensors if ".1." in n and "att" in n and tensors[n].dim() > 1)
        tensors[name][0, 0] += 1.0
        nudged = Runner(decoder, tensors)(ids)
    size = theirs.abs().max()
    return (
        float((theirs - ours).abs().max() / size),
        left,
        float((theirs - nudged).abs().max() / size),
    )
