"""Architecture name of a config.json -> the family that describes it."""

from __future__ import annotations

import difflib

from radixlm.arch.families.builders import FAMILIES, Family
from radixlm.base.errors import CheckpointError

__all__ = ["FAMILIES", "UnknownArchitecture", "find"]


class UnknownArchitecture(CheckpointError):
    """No family describes the checkpoint."""


def find(architecture: str, source: str = "config.json") -> Family:
    """The family of ``architecture``; CheckpointError with the nearest names if there is none."""
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    near = difflib.get_close_matches(architecture, FAMILIES, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise UnknownArchitecture(f"{source}: unknown architecture {architecture!r}{hint}")
