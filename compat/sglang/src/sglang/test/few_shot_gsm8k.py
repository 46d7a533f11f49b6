"""``python -m sglang.test.few_shot_gsm8k``: `radixlm eval gsm8k` of a server."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from radixlm.__main__ import main
from sglang.test.evals import evaluate

_FLAGS = {
    "host": "--host",
    "port": "--port",
    "data_path": "--data-path",
    "num_shots": "--num-shots",
    "num_questions": "--limit",
    "max_new_tokens": "--max-tokens",
    "parallel": "--num-threads",
    "temperature": "--temperature",
}


def run_eval(args: Namespace) -> dict[str, Any]:
    """``accuracy``, ``invalid``, ``latency`` (s) and ``output_throughput`` (tokens/s)."""
    return evaluate("gsm8k", args, _FLAGS)


if __name__ == "__main__":
    sys.exit(main(["eval", "gsm8k", "--host", "127.0.0.1", *sys.argv[1:]]))
