"""Lines of the log about the load and long prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.operations.step_log import PREFILL_S, LoadLog


def request(rid: str, done: int, prompt_len: int, num_forced: int = 0) -> Any:
    return SimpleNamespace(
        rid=rid, num_committed=done, num_computed=done, prompt_len=prompt_len, num_cached=0,
        prefill_len=prompt_len + num_forced, started_s=0.0, is_prefilling=True,
    )  # fmt: skip


def test_long_prompts_are_told_and_forced_tokens_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    limits = SimpleNamespace(log_interval=40, log_every_s=5.0)
    scheduler: Any = SimpleNamespace(limits=limits, clock=lambda: 0.0)
    log = LoadLog(scheduler)
    constrained = request("constrained", 1009, 100, num_forced=911)
    log.write_prefills([constrained], PREFILL_S)
    assert caplog.text == ""
    log.write_prefills([constrained, request("long", 500, 2000)], 2 * PREFILL_S)
    assert "prefill long: 500 of 2000 tokens (25 %" in caplog.text and "more" not in caplog.text
