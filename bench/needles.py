"""What is found in a long text, by the options of the KV cache: a model of two layers whose weights
are written by hand (an induction head, arXiv:2209.11895) goes on as the text did after the same
token before. A text of random tokens hides a key and the four tokens behind it at each of some
depths, and the prompt ends with the key. Share of right tokens behind the first one, which a
prompt's last token, always dense, gives.

    PYTHONPATH=src python bench/needles.py --lengths 1000 8000 --cache int4
    PYTHONPATH=src python bench/needles.py --lengths 8000 --sparse 32
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from radixlm import Engine

CODE, HEAD, VOCAB, FILLERS, ANSWER = 64, 128, 640, 400, 4
BASE = 1e12  # of the rope: its second half hardly turns within a million tokens
NEAR, FAR = 14.0, 3.0  # factors of the scores: hard choices
DEPTHS = (0, 25, 50, 75, 100)
TURNING = [*range(16), *range(64, 80)]  # channels of the fastest 16 pairs
STILL = [*range(32, 64), *range(96, 128)]  # of the slowest 32
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 3 * CODE,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "max_position_embeddings": 1 << 18,
    "rope_theta": BASE,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def weights() -> dict[str, Tensor]:
    """A hidden state has three parts of 64 channels: the token's code, the code of the token before
    it (layer 0 copies it, by the rotation of one place), and the code of the next one (layer 1
    copies it from where the token before is the current one)."""
    codes = torch.randint(0, 2, (VOCAB, CODE), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    blank = torch.zeros(VOCAB, CODE)
    angle = BASE ** (-torch.arange(16) / 64)
    zeros = {
        "q_proj": (HEAD, 3 * CODE), "k_proj": (HEAD, 3 * CODE), "v_proj": (HEAD, 3 * CODE),
        "o_proj": (3 * CODE, HEAD),
    }  # fmt: skip
    found = {
        "model.embed_tokens.weight": torch.cat((codes, blank, blank), 1),
        "lm_head.weight": torch.cat((blank, blank, codes), 1),
        "model.norm.weight": torch.ones(3 * CODE),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        parts = {name: torch.zeros(shape) for name, shape in zeros.items()}
        biases = {name: torch.zeros(HEAD) for name in ("q_proj", "k_proj", "v_proj")}
        if layer == 0:
            biases["k_proj"][:16] = NEAR
            biases["q_proj"][:16], biases["q_proj"][64:80] = NEAR * angle.cos(), -NEAR * angle.sin()
        else:
            parts["q_proj"][STILL, range(CODE)] = FAR
            parts["k_proj"][STILL, range(CODE, 2 * CODE)] = FAR
        # what a norm divides by, so that codes stay whole numbers
        parts["v_proj"][range(CODE), range(CODE)] = math.sqrt((layer + 1) / 3)
        parts["o_proj"][range((layer + 1) * CODE, (layer + 2) * CODE), range(CODE)] = 1.0
        found |= {f"{at}self_attn.{name}.weight": one for name, one in parts.items()}
        found |= {f"{at}self_attn.{name}.bias": one for name, one in biases.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = torch.ones(3 * CODE)
        for name in ("gate_proj", "up_proj"):
            found[f"{at}mlp.{name}.weight"] = torch.zeros(32, 3 * CODE)
        found[f"{at}mlp.down_proj.weight"] = torch.zeros(3 * CODE, 32)
    return {name: one.bfloat16().contiguous() for name, one in found.items()}


def write_model(folder: Path) -> None:
    """The checkpoint, and heavy channels of it for double sparsity: half of those that matter."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    lists = {0: TURNING, 1: STILL[::2]}
    named = {f"model.layers.{layer}.self_attn.qk_proj": [one] for layer, one in lists.items()}
    (folder / "channels.json").write_text(json.dumps(named))


def prompts(length: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """For each depth a prompt and the tokens that follow; all prompts are one text."""
    draw = random.Random(f"{length}/{seed}")
    text = [draw.randrange(FILLERS) for _ in range(length)]
    rare = iter(draw.sample(range(FILLERS, VOCAB), len(DEPTHS) * (1 + ANSWER)))
    needles = [[next(rare) for _ in range(1 + ANSWER)] for _ in DEPTHS]
    for depth, needle in reversed(list(zip(DEPTHS, needles, strict=True))):
        place = 1 + depth * (length - 1) // 100  # the first token seems its own predecessor
        text[place:place] = needle
    return [[*text, key] for key, *_ in needles], [answer for _, *answer in needles]


def score(engine: Engine, length: int, seeds: int) -> list[float]:
    """The share of right tokens behind the first, by depth."""
    right = [0] * len(DEPTHS)
    params = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
    for seed in range(seeds):
        asked, wanted = prompts(length, seed)
        replies = engine.generate(input_ids=asked, sampling_params=params)
        for i, (reply, answer) in enumerate(zip(replies, wanted, strict=True)):
            pairs = zip(reply["output_ids"][1:], answer[1:], strict=True)
            right[i] += sum(ours == theirs for ours, theirs in pairs)
    return [one / (seeds * (ANSWER - 1)) for one in right]


def options_of(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options."""
    found: dict[str, Any] = {
        "model_path": str(folder), "skip_tokenizer_init": True, "log_level": "error",
        "max_total_tokens": 2 * max(args.lengths) + 1024, "cpu_threads": 2,
        "kv_cache_dtype": args.cache,
    }  # fmt: skip
    if args.window:
        found["streaming_window"] = args.window
    if args.sparse:
        found |= {
            "enable_double_sparsity": True,
            "ds_channel_config_path": str(folder / "channels.json"),
            "ds_heavy_channel_num": 32,
            "ds_heavy_token_num": args.sparse,
            "ds_sparse_decode_threshold": 512,
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--seeds", type=int, default=2, help="texts of each length")
    parser.add_argument("--cache", default="bf16", help="--kv-cache-dtype")
    parser.add_argument("--sparse", type=int, default=0, help="double sparsity: tokens of a head")
    parser.add_argument("--window", type=int, default=0, help="--streaming-window")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        with Engine(**options_of(Path(name), args)) as engine:
            for length in args.lengths:
                start_s = time.perf_counter()
                found = score(engine, length, args.seeds)
                of_depth = "  ".join(
                    f"{depth} %: {one:.2f}" for depth, one in zip(DEPTHS, found, strict=True)
                )
                print(f"{length:>7} tokens  {of_depth}  ({time.perf_counter() - start_s:.1f} s)")


if __name__ == "__main__":
    main()
