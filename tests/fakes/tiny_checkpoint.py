"""Tiny random checkpoints in Hugging Face format: config, weights, tokenizer, chat template.

``make_tiny`` writes one; ``cached_tiny`` writes it once a test session and returns its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.arch.oracle import TINY_CONFIGS
from tests.fakes.decoder_configs import DECODER_CONFIGS
from tests.fakes.newer_references import CHECKPOINT, NUMBERS, skip_if_older
from tests.fakes.session_folder import session_folder
from tests.fakes.text_models import class_of

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
# architecture -> changes to TINY; None drops a key. Windows are
# longer than a page of 4 tokens, and logits are not scaled to near zero.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    arch: {
        **changes,
        **({"sliding_window": 7} if "sliding_window" in changes else {}),
        **({"n_positions": 256} if "n_positions" in changes else {}),
        **({"logit_scale": 0.9} if arch.startswith("Cohere") else {}),
        # transformers zeroes the padding row when it loads this one
        **({"pad_token_id": None} if arch.startswith("Youtu") else {}),
    }
    for arch, changes in TINY_CONFIGS.items()
} | DECODER_CONFIGS

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
    skip_if_older(arch, CHECKPOINT)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cls = class_of(arch)
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
    """Random weights with a spread of logits near one, and norms and biases that have an effect."""
    buffers = [b for name, b in model.named_buffers() if "correction" in name]
    trained = [p for p in model.parameters() if p.requires_grad]  # a table of sines is not
    with torch.no_grad():
        for tensor in [*trained, *buffers]:
            if tensor.dim() > 1:
                tensor.normal_(0, 0.1)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by token id
                count = model.config.num_local_experts
                best = torch.rand(table.shape[0], count).argsort(-1)
                table.copy_(best[:, : table.shape[1]])


def cached_tiny(
    arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **config_overrides: Any
) -> Path:
    """The folder of a checkpoint that is made once a session, for all of its processes. It is
    read-only."""
    key = json.dumps([arch, seed, str(dtype), config_overrides], sort_keys=True, default=str)
    name = f"{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = session_folder() / name
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=session_folder()))
        make_tiny(arch, made, seed, dtype, **config_overrides)
        with contextlib.suppress(OSError):  # another process was quicker
            made.rename(folder)
    return folder


def copy_tiny(source: Path, target: Path) -> Path:
    """A writable copy of a cached checkpoint."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def reference_model(folder: Path) -> Any:
    """The Hugging Face model of a folder, in float32 with eager attention."""
    config = json.loads((folder / "config.json").read_text())
    skip_if_older(config["architectures"][0], NUMBERS)
    cls = class_of(config["architectures"][0])
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
