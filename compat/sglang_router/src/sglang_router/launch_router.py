"""``python -m sglang_router.launch_router``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs, parse_args

__all__ = ["Router", "RouterArgs", "launch_router", "main", "parse_router_args"]

logger = logging.getLogger("router")


def launch_router(args: Any) -> None:
    """Start the gateway of a RouterArgs, or of what a parser with its flags has read; serve until
    a signal."""
    try:
        router_args = args if isinstance(args, RouterArgs) else RouterArgs.from_cli_args(args)
        router_args._validate_router_args()
        Router.from_args(router_args).start()
    except Exception as error:
        logger.error(f"Error starting router: {error}")
        raise


def parse_router_args(args: Sequence[str]) -> Any:
    """Flags as a RouterArgs."""
    name = "sglang_router.launch_router"
    return parse_args(args, argparse.ArgumentParser(prog=name, usage="%(prog)s [options]"))


def main() -> None:
    """Serve with the flags of the command line."""
    try:
        args = parse_router_args(sys.argv[1:])
    except ValueError as error:
        print(f"sglang_router.launch_router: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        launch_router(args)
    except (ValueError, RuntimeError):
        sys.exit(2)  # it is logged


if __name__ == "__main__":
    main()
