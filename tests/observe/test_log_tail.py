"""The last log lines of a process."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import msgspec
import pytest

from radixlm.observe.log_tail import KEEP, LogTail


@pytest.fixture
def tail() -> Iterator[LogTail]:
    made = LogTail("engine")
    made.install()
    yield made
    logging.getLogger().removeHandler(made)


def test_lines_are_told_once(tail: LogTail) -> None:
    log = logging.getLogger("radixlm.test")
    log.setLevel(logging.INFO)
    logging.getLogger("radixlm.requests").warning("a prompt")
    log.info("one %d", 1)
    (line,), count = tail.since(0)
    assert line[1:] == ("INFO", "engine", "one 1") and count == 1
    assert tail.since(count) == ([], 1)
    for i in range(2 * KEEP):
        log.info("line %d", i)
    lines, count = tail.since(count)
    assert count == 2 * KEEP + 1 and len(lines) == KEEP and lines[-1][3] == f"line {2 * KEEP - 1}"


def test_a_message_that_cannot_be_made_breaks_nobody(
    tail: LogTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(tail, "handleError", told.append)
    record = logging.LogRecord("other", logging.INFO, "f.py", 1, "%d", ("x",), None)
    tail.handle(record)
    assert told == [record] and tail.since(0) == ([], 0)


def test_every_line_can_be_sent(tail: LogTail) -> None:
    tail.handle(logging.LogRecord("other", logging.INFO, "f.py", 1, "/a\udcff", (), None))
    (line,), _ = tail.since(0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(line))[3] == "/a\\udcff"


def test_a_signal_handler_may_log_while_lines_are_read(tail: LogTail) -> None:
    def log_one(*_: object) -> None:
        tail.handle(logging.LogRecord("other", logging.INFO, "f.py", 1, "told", (), None))

    before = signal.signal(signal.SIGUSR2, log_one)
    try:
        with tail._own:
            assert tail._own.acquire(blocking=False), "else the next line waits for ever"
            tail._own.release()
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert tail.since(0)[0][0][3] == "told"
