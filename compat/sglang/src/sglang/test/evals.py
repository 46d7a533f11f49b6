"""Evaluations by ``radixlm eval``, for the modules that SGLang's users call."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.evals.cli import main


def evaluate(task: str, args: Namespace, flags: Mapping[str, str]) -> dict[str, Any]:
    """The figures of ``radixlm eval TASK``. ``flags``: the flag of each attribute of ``args``; one
    that is missing or None is left out. RuntimeError if a request failed."""
    words = [task, "--disable-tqdm"]
    for name, flag in flags.items():
        value = getattr(args, name, None)
        if value is not None:
            words += [flag, str(value)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.jsonl"
        status = main([*words, "--output-file", str(path)])
        figures: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    if status:
        raise RuntimeError(f"{figures['errors']} requests of {task} failed")
    return figures
