"""Launches that are known against Triton's own, with a driver that only records them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from radixlm.kernels.triton import launch as module
from radixlm.kernels.triton.launch import cdiv, launch, next_power_of_2

_X = torch.zeros(64, dtype=torch.float16)
_BASE = {"x": _X, "free": _X, "n": 5, "eps": 0.5, "count": 7, "FLAG": 1, "num_warps": 4}
_CHANGES: list[dict[str, Any]] = [
    {}, {"x": _X[1:]}, {"free": _X[1:]}, {"x": _X.bfloat16()}, {"x": _X[8:]}, {"x": None},
    {"n": 1}, {"n": True}, {"n": 1.0}, {"n": 0}, {"n": 16}, {"n": 48}, {"n": 2**31},
    {"eps": 1.0}, {"eps": 1}, {"count": 1}, {"count": 16}, {"FLAG": 2}, {"FLAG": 1.0},
    {"FLAG": "a"}, {"num_warps": 8}, {"x": _X[1:], "n": 16},
]  # fmt: skip


def _body(x, free, n, eps, count, FLAG: tl.constexpr):
    """Never runs."""


class _Driver:
    """Devices without a GPU: knows only what Triton asks for before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 77

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """A kernel whose compiled forms write down what they are and what they are given."""

    def __init__(self) -> None:
        names = {"do_not_specialize": ["count"], "do_not_specialize_on_alignment": ["free"]}
        self.jit = JITFunction(_body, **names)
        self.jit.device_caches[0]  # sets what replaces the compiler
        self.jit.compile = self._compile
        self.launches: list[tuple[Any, ...]] = []
        self.was_direct = False

    def _compile(self, source: Any, target: Any, options: Any, **_: Any) -> SimpleNamespace:
        what = (source.signature, source.constants, source.attrs, options["num_warps"])
        return SimpleNamespace(
            run=self._run, function=repr(what), packed_metadata=(),
            launch_metadata=lambda *_: None,
        )  # fmt: skip

    def _run(self, *args: Any) -> None:
        self.was_direct = args[7] is None  # the hook
        given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[9:]]
        self.launches.append((*args[:6], *((type(value), value) for value in given)))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    monkeypatch.setattr(driver, "_active", _Driver())
    monkeypatch.setattr(module, "_known", {})
    return _Kernel()


def _split(changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    given = _BASE | changes
    named = {name: given.pop(name) for name in ("FLAG", "num_warps")}
    return list(given.values()), named


def _launch(kernel: _Kernel, **changes: Any) -> None:
    args, named = _split(changes)
    launch(kernel.jit, (2, 3), tuple(args[:2]), tuple(args[2:]), **named)


def test_launches_are_those_of_triton(kernel: _Kernel) -> None:
    """Whatever was launched before: the same compiled kernel, grid, stream and arguments."""
    plain = []
    for changes in _CHANGES:
        args, named = _split(changes)
        kernel.jit[2, 3](*args, **named)
        plain.append(kernel.launches[-1])
    assert len({launched[4] for launched in plain}) > len(_CHANGES) / 2  # kernels
    for is_known in (False, True):
        for changes, launched in zip(_CHANGES, plain, strict=True):
            _launch(kernel, **changes)
            assert kernel.launches[-1] == launched, changes
            assert kernel.was_direct or not is_known or changes == {"x": None}, changes


def test_hooks_are_called(kernel: _Kernel) -> None:
    hook = triton.knobs.runtime.launch_enter_hook
    _launch(kernel)
    hook.add(print)
    try:
        _launch(kernel)
        assert not kernel.was_direct
    finally:
        hook.remove(print)
    _launch(kernel)
    assert kernel.was_direct


def test_known_launches_are_bounded(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    for n in range(10):
        _launch(kernel, n=n)
        assert len(module._known) <= 3


def test_sizes_are_those_of_triton() -> None:
    for n in range(70):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert cdiv(n, 8) == triton.cdiv(n, 8)
