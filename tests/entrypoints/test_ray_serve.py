"""The policy of the Ray Serve application; skipped without the package ray."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "serve.py"


@pytest.fixture(scope="module")
def application() -> Iterator[ModuleType]:
    pytest.importorskip("ray.serve")
    spec = importlib.util.spec_from_file_location("ray_application", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # Ray pickles its functions by name
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("waiting", "current", "wanted"),
    [(0, 1, 1), (0, 3, 2), (1, 2, 2), (7, 1, 1), (8, 1, 2), (17, 2, 4), (1000, 1, 4)],
)
def test_replicas_follow_the_queue(
    application: ModuleType, waiting: float, current: int, wanted: int
) -> None:
    policy = application.GrowWithTheQueue(8.0)
    assert policy.replicas(waiting, current, least=1, most=4) == wanted
