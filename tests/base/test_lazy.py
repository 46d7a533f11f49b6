"""Optional packages."""

from __future__ import annotations

import io
import sys

import pytest

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import require, require_transformers


def test_transformers_draws_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    library = pytest.importorskip("transformers")
    library.logging.enable_progress_bar()
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    made = require_transformers("hf", "a test")
    for _ in made.logging.tqdm(range(3), desc="weights", file=stream):
        pass
    assert not stream.getvalue()


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a test needs the package 'no_such'.*radixlm\[hf\]"):
        require("no_such.module", "hf", "a test")
