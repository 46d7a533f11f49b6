"""Isolation of every test: its own random numbers, a fresh logging configuration, and property
tests without a deadline.

`TRITON_INTERPRET` is set before anything imports triton, so kernels of this process are interpreted
on CPU tensors. With `TRITON_INTERPRET=0` in the environment they run on a GPU. `OMP_NUM_THREADS`
and `OMP_WAIT_POLICY` are set before anything imports torch, so that threads of several workers do
not spin for each other on the same cores. Tests that need threads ask for them.
"""

import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from radixlm.base import log
from tests.fakes.interpreter import replace_language_once_a_launch
from tests.fakes.session_folder import begin_session, end_session

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile(
    "radixlm",
    deadline=None,  # a machine may be slow or busy
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("radixlm")

WAITING = {"bench", "chaos", "end_to_end"}
_LOGGERS = ("", log._ROOT, log.ACCESS, *log._QUIET, *log._HTTP)
_State = list[tuple[logging.Logger, int, list[logging.Handler], bool]]


def _logging_state() -> _State:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    return [(one, one.level, list(one.handlers), one.propagate) for one in loggers]


def _restore_logging(before: _State) -> None:
    logging.captureWarnings(False)
    for one, level, handlers, propagate in before:
        one.setLevel(level)
        one.handlers[:] = handlers
        one.propagate = propagate


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(gc.unfreeze)
    if begin_session():
        config.add_cleanup(end_session)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that wait for processes. One worker has them at first, and the others, which
    take over tests from the end, use the cores meanwhile."""
    items.sort(key=lambda item: not WAITING & set(item.nodeid.split("/")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect without the garbage collector, since imports and tests leave hardly any garbage, and
    let it look later at what tests make, not at all modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed random numbers for each test, fixtures included; torch only if it is imported."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # where there is no device, torch.manual_seed notes the stack for it, which takes 1 ms
        is_used = torch.cuda.is_initialized()
        (torch.manual_seed if is_used else torch.default_generator.manual_seed)(0)
        torch.set_num_threads(1)  # an engine of a test before may have asked for more
    replace_language_once_a_launch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[Any]:
    """Restore logging after each test, because commands that run in this process configure it."""
    before = _logging_state()
    result = yield
    _restore_logging(before)
    return result
