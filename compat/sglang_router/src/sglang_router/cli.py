"""``smg launch`` and ``smg server``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixlm import __version__ as engine_version
from radixlm.base.lazy import load
from sglang_router.version import __version__

USAGE = """usage: smg launch|server [options]

  launch    start the gateway in front of workers
  server    start servers on this machine, and the gateway in front of them

`smg launch --help` and `smg server --help` list the options."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words else ""
    if verb in ("--version", "-V", "--version-verbose"):
        print(f"sglang-router {__version__} (RadixLM {engine_version})")
        sys.exit(0)
    if verb in ("launch", "start"):
        launcher = load("sglang_router.launch_router:launch_router")
        launcher(load("sglang_router.launch_router:parse_router_args")(words[1:]))
    elif verb == "server":
        sys.exit(load("sglang_router.launch_server:main")(words[1:]))
    else:
        print(USAGE)
        sys.exit(0 if verb in ("-h", "--help") else 1)
