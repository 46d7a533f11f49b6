"""GGUF files of Gemma 4: heads by kind of layer, shared K and V, experts, per-layer inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.weights.test_gguf_names import IDS, convert

from radixlm.engine.gguf import unpacked

GLOBAL_DIM, GLOBAL_KV_HEADS = 32, 1  # of full layers
ROPES = {
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 500000.0, "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 8000.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("has_experts", "k_eq_v", "shared", "inputs"), [(True, True, 0, 0), (False, False, 2, 16)]
)
def test_gemma4(
    has_experts: bool,
    k_eq_v: bool,
    shared: int,
    inputs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_tiny(
        "Gemma4ForCausalLM",
        enable_moe_block=has_experts,
        attention_k_eq_v=k_eq_v,
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=inputs,
        rope_parameters=ROPES,
        global_head_dim=GLOBAL_DIM,
        num_global_key_value_heads=GLOBAL_KV_HEADS,
    )
    c = json.loads((folder / "config.json").read_text())
    kinds = [kind == "sliding_attention" for kind in c["layer_types"]]
    inner, first = c["intermediate_size"], len(kinds) - shared
    full = GLOBAL_KV_HEADS if k_eq_v else c["num_key_value_heads"]
    extra = {
        "attention.sliding_window_pattern": kinds,
        "attention.shared_kv_layers": shared,
        "attention.key_length": GLOBAL_DIM,
        "attention.key_length_swa": c["head_dim"],
        "attention.head_count_kv": [c["num_key_value_heads"] if one else full for one in kinds],
        "feed_forward_length": [inner * (1 + (i >= first)) for i in range(len(kinds))],
        "embedding_length_per_layer_input": inputs,
        "final_logit_softcapping": c["final_logit_softcapping"],
        "rope.freq_base": 500000.0,
        "rope.freq_base_swa": 8000.0,
        "expert_count": c["num_experts"] if has_experts else None,
        "expert_used_count": c["top_k_experts"] if has_experts else None,
    }
    half = GLOBAL_DIM // 2
    frequencies = torch.tensor([1.0] * (half // 4) + [1e30] * (half - half // 4))
    tables = {"rope_freqs.weight": (frequencies, "F32")}
    file = convert(folder, tmp_path / "m.gguf", "gemma4", extra, tables=tables)
    got, wanted = (
        PagedRunner(load_model(one)).prefill({0: IDS}, num_chunks=2)[0]
        for one in (unpacked(file), folder)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
