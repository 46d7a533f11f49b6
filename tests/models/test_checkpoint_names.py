"""Checkpoints with the tensor names of transformers and with the published names give the same
model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.paged_runner import PagedRunner, load_model
from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny, reference_model

from radixlm.base.errors import CheckpointError

IDS = {0: list(range(40, 62))}
OTHERS = (
    *("HYV4ForCausalLM", "DeepseekV4ForCausalLM", "Glm5NextForCausalLM"),
    *("Dots3NoteForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM", "BioGptForCausalLM"),
)


def _renamed(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder = copy_tiny(source, target)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _logits(folder: Path) -> torch.Tensor:
    return PagedRunner(load_model(folder)).prefill(IDS)[0]


@pytest.mark.parametrize("architecture", OTHERS)
def test_the_names_of_the_class(architecture: str, tmp_path: Path) -> None:
    saved = cached_tiny(architecture)
    state = reference_model(saved).state_dict()
    own = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    assert set(own) != set(load_file(saved / "model.safetensors"))  # saved with the published names
    assert torch.equal(_logits(_renamed(saved, tmp_path / "own", own)), _logits(saved))


def test_names_without_a_prefix(tmp_path: Path) -> None:
    saved = cached_tiny("DeepseekV4ForCausalLM")
    bare = {_bare(name): tensor for name, tensor in load_file(saved / "model.safetensors").items()}
    assert {"embed.weight", "hc_head_fn", "layers.1.attn.kv_norm.weight"} <= set(bare)
    bare["mtp.0.attn.wkv.weight"] = torch.zeros(2, 2)  # of a multi-token prediction layer
    assert torch.equal(_logits(_renamed(saved, tmp_path / "bare", bare)), _logits(saved))


def _bare(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens", "embed").replace(".hc_hc_", ".hc_")
    name = name.replace("hc_head.hc_", "hc_head_")
    return name.replace("attn.norm.", "attn.kv_norm.")


def test_minimax_m3_under_published_names(tmp_path: Path) -> None:
    saved = cached_tiny("MiniMaxM3VLForCausalLM")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        name = "language_model." + name.replace("self_attn.indexer.", "self_attn.index_")
        for part in ("gate.", "experts.", "shared_experts."):
            name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
        name = name.replace("gate.e_score", "e_score")
        if "moe.experts." in name:
            parts = {"w2": tensor} if "down" in name else {}
            parts = parts or dict(zip(("w1", "w3"), tensor.chunk(2, 1), strict=True))
            at = name.rpartition(".")[0]
            for ours, stack in parts.items():
                each = {f"{at}.{e}.{ours}.weight": one.clone() for e, one in enumerate(stack)}
                tensors |= each
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                tensors[name.replace("gate_up_proj", part)] = rows.clone()
        else:
            tensors[name] = tensor
    assert "language_model.model.layers.1.block_sparse_moe.experts.7.w3.weight" in tensors
    assert torch.equal(_logits(_renamed(saved, tmp_path / "old", tensors)), _logits(saved))


def test_a_table_of_experts_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    saved = cached_tiny("DeepseekV4ForCausalLM")
    tensors = load_file(saved / "model.safetensors")
    name = next(one for one in tensors if one.endswith("tid2eid"))
    tensors[name][0, 0] = 8
    with pytest.raises(CheckpointError, match="table of experts by token"):
        load_model(_renamed(saved, tmp_path / "wrong", tensors))
    tensors[name] = tensors[name].float()
    with pytest.raises(CheckpointError, match=r"experts_of_token is of integers"):
        load_model(_renamed(saved, tmp_path / "floats", tensors))


SPARSE_GEMMA = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
STACKED: list[tuple[str, dict[str, Any]]] = [
    ("Llama4ForCausalLM", {}),
    ("Gemma4ForCausalLM", {"enable_moe_block": True, **SPARSE_GEMMA}),
    ("GraniteMoeForCausalLM", {}),
    ("GptOssForCausalLM", {}),
]
# the tensors of all experts: where, which, and whether they are biases
_OF_EXPERTS = re.compile(
    r"(.*?)(?:experts\.)?(gate_up_proj|(?<=experts\.)down_proj|(?:in|out)put_linear)(_bias)?(?:\.weight)?$"
)
_UP = ("gate_up_proj", "input_linear")


def _one_by_one(saved: Path, *, is_joined: bool) -> dict[str, torch.Tensor]:
    """The tensors with a matrix [out, in] of each expert; gate and up are two unless
    ``is_joined``."""
    has_inputs_first = "Granite" not in str(saved) and "Gemma" not in str(saved)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        found = _OF_EXPERTS.match(name)
        if found is None or "shared" in name:
            tensors[name] = tensor
            continue
        kind = "bias" if found[3] else "weight"
        for expert, one in enumerate(tensor):
            rows = one.T if has_inputs_first and kind == "weight" else one
            parts = {found[2] if is_joined else "down_proj": rows}
            if found[2] in _UP and not is_joined:
                pair = (rows[0::2], rows[1::2]) if "GptOss" in str(saved) else rows.chunk(2)
                parts = dict(zip(("gate_proj", "up_proj"), pair, strict=True))
            for part, value in parts.items():
                own = f"{found[1]}experts.{expert}.{part}.{kind}"
                tensors[own] = value.clone().contiguous()
    assert any("experts.1." in name for name in tensors)
    return tensors


@pytest.mark.parametrize(("architecture", "changes"), STACKED)
def test_each_expert_has_tensors_of_its_own(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """As tools store stacked experts that quantize one matrix after another."""
    saved = cached_tiny(architecture, **changes)
    own = _one_by_one(saved, is_joined=False)
    assert torch.equal(_logits(_renamed(saved, tmp_path / "own", own)), _logits(saved))


def test_gpt_oss_as_quark_stores_it(tmp_path: Path) -> None:
    """Gate and up of an expert are one matrix, row by row in turn."""
    saved = cached_tiny("GptOssForCausalLM")
    own = _one_by_one(saved, is_joined=True)
    assert torch.equal(_logits(_renamed(saved, tmp_path / "own", own)), _logits(saved))


def test_gpt_oss_as_unsloth_stores_it(tmp_path: Path) -> None:
    """A layer for each expert in lists of their own, and for the router."""
    saved = cached_tiny("GptOssForCausalLM")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        stem, _, part = name.rpartition(".experts.")
        if not stem:
            tensors[name.replace("mlp.router.", "mlp.router.linear.")] = tensor
            continue
        kind = part.removesuffix("_bias")
        for expert, own in enumerate(tensor):
            suffix = "weight" if kind == part else "bias"
            rows = own.T.contiguous() if kind == part else own.clone()
            tensors[f"{stem}.experts.{kind}s.{expert}.{suffix}"] = rows
    assert torch.equal(_logits(_renamed(saved, tmp_path / "unsloth", tensors)), _logits(saved))
