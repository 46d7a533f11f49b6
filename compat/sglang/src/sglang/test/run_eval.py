"""``python -m sglang.test.run_eval --eval-name TASK``: `radixlm eval` of a server."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from radixlm.__main__ import main
from sglang.test.evals import evaluate

_FLAGS = {
    "base_url": "--url",
    "host": "--host",
    "port": "--port",
    "model": "--model",
    "num_examples": "--limit",
    "num_threads": "--num-threads",
    "num_shots": "--num-shots",
    "gsm8k_data_path": "--data-path",
    "max_tokens": "--max-tokens",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "reasoning_effort": "--reasoning-effort",
    "repeat": "--repeat",
}


def run_eval(args: Namespace) -> dict[str, Any]:
    """The figures of `radixlm eval`; ``score`` is the accuracy."""
    figures = evaluate(args.eval_name, args, _FLAGS)
    return {**figures, "score": figures["accuracy"]}


if __name__ == "__main__":
    sys.exit(main(["eval", "--host", "127.0.0.1", *sys.argv[1:]]))
