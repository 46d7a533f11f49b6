"""The names of ``sglang.test.test_utils`` that tests of programs use."""

from __future__ import annotations

import argparse
import os
import unittest
from importlib.resources import files
from typing import Any

import radixlm

DEFAULT_MODEL_NAME_FOR_TEST = os.environ.get("RADIXLM_TEST_MODEL") or str(
    files("radixlm") / "assets" / "radix-tiny"
)
DEFAULT_URL_FOR_TEST = "http://127.0.0.1:21000"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 600


class CustomTestCase(unittest.TestCase):
    """A test case."""


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the flags that benchmarks of programs share, and read the command line."""
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--backend", default="srt")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "rocm", "cpu"])
    parser.add_argument("--result-file", default="result.jsonl")
    parser.add_argument("--raw-result-file")
    return parser.parse_args()


def select_sglang_backend(args: argparse.Namespace) -> Any:
    """The backend that ``--backend`` names. ValueError for an unknown one."""
    if args.backend.startswith("srt"):
        return radixlm.RuntimeEndpoint(f"{args.host}:{args.port}")
    if args.backend.startswith("gpt-"):
        return radixlm.OpenAI(args.backend)
    raise ValueError(f"--backend {args.backend}: srt works")
