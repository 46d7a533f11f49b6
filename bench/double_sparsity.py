"""A decode step at 32,768 tokens, dense and with double sparsity, or over int8 and int4 caches: a
model of Qwen3-0.6B's shape, dummy weights, random keys and values.

    PYTHONPATH=src python bench/double_sparsity.py --kv-cache-dtype bf16 --quantization w8a8_int8
    PYTHONPATH=src python bench/double_sparsity.py --kv-cache-dtype int4 --quantization w8a8_int8
    PYTHONPATH=src python bench/double_sparsity.py --kv-cache-dtype int4 --sparse
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from radixlm.attention.base import AttentionBackend
from radixlm.attention.double_sparsity import DoubleSparsity
from radixlm.attention.select import make_backend
from radixlm.config.server_config import ServerConfig
from radixlm.engine.load_model import load_model
from radixlm.engine.model_info import read_model
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.kv import BY_FLAG
from radixlm.models.build import Model
from radixlm.models.program.step import make_program
from radixlm.step.batch import ForwardBatch

TOKENS, PAGE, CHOSEN, CHANNELS = 32_768, 16, 2048, 32
LAYERS, KV_HEADS, HEAD = 28, 8, 128
CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _model(quantization: str | None) -> Model:
    """With dummy weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = ServerConfig.from_kwargs(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            quantization=quantization,
        )
        return load_model(config, read_model(config)[0], CPU, bind("cpu"))[0]


def _batch(backend: AttentionBackend, num_pages: int) -> ForwardBatch:
    """One sequence that decodes its last token."""
    return ForwardBatch(
        token_ids_T=torch.tensor([5]),
        positions_T=torch.tensor([TOKENS - 1]),
        rope_len_T=torch.tensor([TOKENS]),
        query_start_S1=torch.tensor([0, 1], dtype=torch.int32),
        kv_len_S=torch.tensor([TOKENS], dtype=torch.int32),
        page_table_GSP=(torch.arange(1, num_pages).int()[None],),
        store_GT=(torch.tensor([PAGE + TOKENS - 1]),),
        logits_rows_R=torch.tensor([0]),
        attn=backend,
        max_query_len=1,
        max_kv_len=TOKENS,
        is_decode=True,
    )


def _step(model: Model, cache: str, sparsity: DoubleSparsity | None) -> Callable[[bool], float]:
    """Runs a step, dense or sparse, and returns its seconds."""
    backend = make_backend("cpu", model.kv_groups, bind("cpu"), CPU, sparsity=sparsity)
    num_pages = TOKENS // PAGE + 1
    pool = backend.make_pool(model.kv_groups[0], num_pages, PAGE, BY_FLAG[cache])
    pool.store(0, torch.arange(PAGE, PAGE + TOKENS), *torch.randn(2, TOKENS, KV_HEADS, HEAD))
    for tensor in pool.tensors:
        tensor[1:].copy_(tensor[:1].expand_as(tensor[1:]))
    program, batch = make_program(model, backend), _batch(backend, num_pages)
    assert program is not None

    def run(is_sparse: bool) -> float:
        backend.sparsity = sparsity if is_sparse else None
        start_s = time.perf_counter()
        backend.begin(batch)
        program.logits(batch)
        return time.perf_counter() - start_s

    return run


def main() -> None:
    """Print the medians of both steps, run in turn, and of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-cache-dtype", default="bf16", choices=["bf16", "int8", "int4"])
    parser.add_argument("--sparse", action="store_true", help="int4: not beside int8")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    native().set_max_threads(args.threads)
    model = _model(args.quantization)
    if args.kv_cache_dtype == "int4" and not args.sparse:
        names, first, second = (
            ("int8", "int4"),
            _step(model, "int8", None),
            _step(model, "int4", None),
        )
    else:
        channels = torch.stack([torch.randperm(HEAD)[:CHANNELS] for _ in range(KV_HEADS)]).int()
        sparsity = DoubleSparsity(dict.fromkeys(range(LAYERS), channels.contiguous()), CHOSEN, 0)
        names, first = ("dense", "sparse"), _step(model, args.kv_cache_dtype, sparsity)
        second = first
    seconds = []
    with torch.inference_mode():
        for _ in range(args.rounds + 1):
            seconds.append((first(False), second(second is first)))
    before, after = (1e3 * median(column) for column in zip(*seconds[1:], strict=True))
    ratio = median(x / y for x, y in seconds[1:])
    print(f"{names[0]} {before:.1f} ms, {names[1]} {after:.1f} ms, {ratio:.2f} times")


if __name__ == "__main__":
    main()
