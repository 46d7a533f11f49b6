"""The prompts of --debug-tensor-dump-input-file; without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load

_INPUT = "--debug-tensor-dump-input-file"


def prompts_of(path: Path) -> list[list[int]]:
    """The prompts in a file of token ids [N] or [B, N], or in a dump; ConfigError."""
    try:
        if path.suffix == ".safetensors":
            found = load("safetensors.numpy:load_file")(path)
            starts = found["query_start"][1:-1]
            return [part.tolist() for part in np.split(found["token_ids"], starts)]
        found = np.load(path) if path.suffix == ".npy" else json.loads(path.read_text())
        is_nested = len(found) > 0 and not np.isscalar(found[0])
        rows = [np.array(row) for row in (found if is_nested else [found])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{_INPUT} {path}: {error}; write token ids as .npy or .json") from error
    for ids in rows:
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or not ids.size:
            raise ConfigError(f"{_INPUT} {path}: a prompt is a list of integers, as [5, 6, 7]")
    return [ids.tolist() for ids in rows]
