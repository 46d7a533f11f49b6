"""The view of one config: attributes, and errors that name the file and the key."""

from __future__ import annotations

import copy

import pytest

from radixlm.arch.config import Config
from radixlm.base.errors import CheckpointError


def test_attributes_and_get() -> None:
    c = Config({"a": 1, "b": None}, "here/config.json")
    assert (c.a, c.b, c.get("b", 5), c.get("z", 6), "a" in c, list(c)) == (
        1,
        None,
        5,
        6,
        True,
        ["a", "b"],
    )
    assert copy.copy(c).a == 1
    assert "here/config.json" in repr(c)
    with pytest.raises(CheckpointError, match=r"here/config\.json: 'z' is missing"):
        _ = c.z


def test_divide() -> None:
    c = Config({"whole": 12, "parts": 4, "odd": 5})
    assert c.divide("whole", "parts") == 3
    with pytest.raises(CheckpointError, match="'whole' = 12 is not a multiple of 'odd' = 5"):
        c.divide("whole", "odd")


def test_refuse() -> None:
    c = Config({"flag": True, "none": None, "kind": "x"})
    c.refuse("absent", 1)
    c.refuse("none", 1)
    c.refuse("kind", "x", "y")
    with pytest.raises(CheckpointError, match="'flag' = True is not supported"):
        c.refuse("flag", False)
    with pytest.raises(CheckpointError, match="must be absent"):
        c.refuse("flag")
