"""`radixlm serve` on unusable checkpoints: exit status 2, with the file and the tensor named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_checkpoint import cached_tiny, copy_tiny

WEIGHTS = "model.safetensors"
TENSOR = "model.layers.1.mlp.down_proj.weight"


def _unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    (folder / "config.json").write_text(json.dumps(config))


def _truncated(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def _wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[TENSOR] = tensors[TENSOR][:, :-1].contiguous()
    save_file(tensors, folder / WEIGHTS)


def _missing_shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:9]}
    shards["model-00002-of-00002.safetensors"] = names[9:]
    table = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    first, held = next(iter(shards.items()))
    save_file({name: tensors[name] for name in held}, folder / first)
    (folder / WEIGHTS).unlink()


def _nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[TENSOR][3, 5] = torch.nan
    save_file(tensors, folder / WEIGHTS)


# how it is damaged, and what the message names
CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "unknown": (_unknown, ("config.json", "NoSuchForCausalLM")),
    "truncated": (_truncated, (WEIGHTS,)),
    "wrong shape": (_wrong_shape, (TENSOR, "95", "96")),
    "missing shard": (_missing_shard, ("model-00002-of-00002.safetensors",)),
    "nan": (_nan, (TENSOR, "NaN")),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name == "nan" else pytest.mark.slow) for name in CASES],
)
def test_it_exits_2_and_names_the_fault(case: str, tmp_path: Path) -> None:
    spoil, words = CASES[case]
    folder = copy_tiny(cached_tiny("LlamaForCausalLM"), tmp_path / "model")
    spoil(folder)
    command = [sys.executable, "-m", "radixlm", "serve", "--port", "0", "--model-path", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in (*words, str(folder)):
        assert word in done.stderr, done.stderr
