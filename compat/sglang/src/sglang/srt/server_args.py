"""``ServerArgs``, and reading them from a command line."""

from __future__ import annotations

from radixlm import ServerArgs as ServerArgs
from radixlm.config.parser import parse


def prepare_server_args(argv: list[str]) -> ServerArgs:
    """The options of a command line, without the program's name. SystemExit for wrong ones."""
    config, given = parse(argv, prog="sglang.launch_server")
    return ServerArgs(**{name: config.value(name) for name in given})
