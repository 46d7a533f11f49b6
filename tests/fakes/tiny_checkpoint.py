"""Tiny random checkpoints in Hugging Face format: config, weights, tokenizer, chat template.

``make_tiny`` writes one; ``cached_tiny`` writes it once a test session and returns its folder.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

VOCAB = 384
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"head_dim": 24}
SLIDING = {"head_dim": 24, "sliding_window": 7}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# architecture -> what its tiny config needs beyond TINY; None drops a key of TINY
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE},
    "MistralForCausalLM": SLIDING,
    "MinistralForCausalLM": SLIDING,
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
    "GraniteForCausalLM": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {"sliding_window": 7, "num_hidden_layers": 4},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2},
    "Exaone4ForCausalLM": {**SLIDING, "num_hidden_layers": 4},
    "GemmaForCausalLM": WIDE,
    "Gemma2ForCausalLM": SLIDING,
    "Gemma3ForCausalLM": {**SLIDING, "num_hidden_layers": 6},
    "CohereForCausalLM": {"use_qk_norm": True, "logit_scale": 0.9},
    "Cohere2ForCausalLM": {"sliding_window": 7, "num_hidden_layers": 4, "logit_scale": 0.9},
    "StableLmForCausalLM": {"qk_layernorm": True},
    "Starcoder2ForCausalLM": {"sliding_window": 7},
    "NemotronForCausalLM": {},
    "GPTNeoXForCausalLM": {"num_key_value_heads": None},
    "FalconForCausalLM": {
        "num_key_value_heads": None,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
    },
    "GPT2LMHeadModel": GPT,
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
    "GptOssForCausalLM": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = [
    "The quick brown fox jumps over the lazy dog. One, two, three: count to ten!",
    "A small model answers short questions about numbers, names and places.",
]


def make_tiny(
    arch: str,
    folder: str | Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint of the architecture; an override of None drops a config key."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cls = getattr(transformers, arch)
    settings = {**TINY, **ARCHITECTURES.get(arch, {}), **config_overrides}
    config = cls.config_class(**{k: v for k, v in settings.items() if v is not None})
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).eval()
        randomise(model)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def randomise(model: torch.nn.Module) -> None:
    """Weights that give logits a spread near one, and norms and biases that matter."""
    buffers = [b for name, b in model.named_buffers() if "correction" in name]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            if tensor.dim() > 1:
                tensor.normal_(0, 0.1)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)


@lru_cache(maxsize=1)
def _cache_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="radixlm-tiny-")


def cached_tiny(
    arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **config_overrides: Any
) -> Path:
    """The folder of a checkpoint that is made once a session. Treat it as read-only."""
    key = json.dumps([arch, seed, str(dtype), config_overrides], sort_keys=True, default=str)
    folder = Path(_cache_folder().name) / f"{arch}-{abs(hash(key)):x}"
    if not (folder / "tokenizer.json").exists():
        make_tiny(arch, folder, seed, dtype, **config_overrides)
    return folder


def copy_tiny(source: Path, target: Path) -> Path:
    """A writable copy of a cached checkpoint."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def reference_model(folder: Path) -> Any:
    """The Hugging Face model of a folder, in float32 with eager attention."""
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB tokens, its config and the chat template."""
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@lru_cache(maxsize=1)
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=[AddedToken(t, special=True) for t in (PAD, BOS, EOS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    return str(tokenizer.to_str())
