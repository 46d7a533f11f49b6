"""A decode step of one layer that chooses what it reads, by all keys under a mask and by the chosen
ones alone: random weights and keys, 2 threads. Shapes: attention of DeepSeek-V3.2 (index) and of
MiniMax-M3 (blocks), without experts.

    PYTHONPATH=src python bench/chosen_attention.py --tokens 8192 32768
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from radixlm.attention.select import make_backend
from radixlm.config.server_config import ServerConfig
from radixlm.engine.load_model import load_model
from radixlm.engine.model_info import read_model
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.dispatch import bind
from radixlm.kernels.ops.kv import BY_FLAG
from radixlm.models.build import Model
from radixlm.step.batch import ForwardBatch

PAGE = 16
CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_experts_per_tok": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "index": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "blocks": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3",
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 2,
        "dense_intermediate_size": 1024,
        "shared_intermediate_size": 64,
        "swiglu_limit": 7.0,
        "hidden_act": "swigluoai",
        "partial_rotary_factor": 0.5,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
        "routed_scaling_factor": 1.0,
        "layer_types": ["minimax_m3_sparse"],
        "mlp_layer_types": ["dense"],
    },
}


def _model(kind: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**COMMON, **SHAPES[kind]}))
        config = ServerConfig.from_kwargs(
            model_path=folder, load_format="dummy", skip_tokenizer_init=True
        )
        return load_model(config, read_model(config)[0], CPU, bind("cpu"))[0]


def _times(kind: str, tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds of a step by the mask and by the chosen, the shortest of seven of either."""
    model = _model(kind)
    backend = make_backend("cpu", model.kv_groups, bind("cpu"), CPU)
    group, num_pages = model.kv_groups[0], tokens // PAGE + 1
    pool: Any = backend.make_pool(group, num_pages, PAGE, dtype)
    rows = [torch.randn(tokens, group.kv_heads, dim) for dim in (group.head_dim, group.v_dim)]
    pool.store(0, torch.arange(PAGE, PAGE + tokens), rows[0], None if group.latent else rows[1])
    batch = ForwardBatch(
        token_ids_T=torch.tensor([5]),
        positions_T=torch.tensor([tokens - 1]),
        rope_len_T=torch.tensor([tokens]),
        query_start_S1=torch.tensor([0, 1], dtype=torch.int32),
        kv_len_S=torch.tensor([tokens], dtype=torch.int32),
        page_table_GSP=(torch.arange(1, num_pages).int()[None],),
        store_GT=(torch.tensor([PAGE + tokens - 1]),),
        logits_rows_R=torch.tensor([0]),
        attn=backend,
        max_query_len=1,
        max_kv_len=tokens,
        is_decode=True,
    )
    best = [float("inf")] * 2
    for _ in range(7):
        for i, patched in enumerate(({"return_value": None}, {"wraps": pool.chosen_reader})):
            with mock.patch.object(pool, "chosen_reader", **patched), torch.inference_mode():
                start_s = time.perf_counter()
                backend.begin(batch)
                model.forward(batch)
                best[i] = min(best[i], 1e3 * (time.perf_counter() - start_s))
    return best[0], best[1]


def main() -> None:
    """Print both kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--kv-cache-dtype", default="bf16", choices=["bf16", "int8"])
    args = parser.parse_args()
    native().set_max_threads(2)
    torch.set_num_threads(2)
    for kind in SHAPES:
        for tokens in args.tokens:
            masked, chosen = _times(kind, tokens, BY_FLAG[args.kv_cache_dtype])
            print(f"{kind} {tokens}: {masked:.1f} ms, {chosen:.1f} ms, {masked / chosen:.1f} times")


if __name__ == "__main__":
    main()
