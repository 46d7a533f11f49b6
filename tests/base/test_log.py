"""Logs: one line a record, no duplicates, levels by logger."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixlm.base import log
from radixlm.base.errors import ConfigError

NAMES = (
    "",
    "radixlm",
    log.ACCESS,
    "uvicorn",
    "uvicorn.access",
    "uvicorn.error",
    "httpx",
    "py.warnings",
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the logging configuration afterwards."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one.level, list(one.handlers), one.propagate) for one in loggers]
    yield
    logging.captureWarnings(False)
    for one, (level, handlers, propagate) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.handlers[:] = handlers
        one.propagate = propagate


def test_a_record_is_one_readable_line() -> None:
    stream = io.StringIO()
    log.set_up_logging("scheduler", stream=stream)
    logging.getLogger("radixlm.x").info("hello %d", 3)
    pattern = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO scheduler: hello 3\n"
    assert re.fullmatch(pattern, stream.getvalue())


def test_a_file_for_dict_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = tmp_path / "config.json", tmp_path / "log"
    handler = {"class": "logging.FileHandler", "filename": str(written), "formatter": "f"}
    config = {
        "version": 1,
        "formatters": {"f": {"format": "mine %(message)s"}},
        "handlers": {"h": handler},
        "root": {"handlers": ["h"]},
        "loggers": {"radixlm.quiet": {"level": "WARNING"}},
    }
    file.write_text(json.dumps(config))
    monkeypatch.setenv("SGLANG_LOGGING_CONFIG_PATH", str(file))
    log.set_up_logging("scheduler", stream=(stream := io.StringIO()))
    logging.getLogger("radixlm.quiet").info("no")
    logging.getLogger("radixlm.x").info("yes")
    assert (written.read_text(), stream.getvalue()) == ("mine yes\n", "")


@pytest.mark.parametrize("text", [None, "[", "[1]", "{}", '{"version": 1, "root": {"level": 7.5}}'])
def test_a_file_for_dict_config_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    monkeypatch.setenv("RADIXLM_LOGGING_CONFIG_PATH", str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match=r"RADIXLM_LOGGING_CONFIG_PATH.* works, such as"):
        log.set_up_logging("scheduler")


def test_a_message_cannot_forge_a_record() -> None:
    stream = io.StringIO()
    log.set_up_logging("http", stream=stream)
    logging.getLogger("radixlm").error("a\n[2025-01-01 00:00:00] INFO http: b\r\n")
    assert stream.getvalue().count("\n") == 1
    assert "a\\n[2025" in stream.getvalue()


def test_control_characters_do_not_reach_the_terminal() -> None:
    stream = io.StringIO()
    log.set_up_logging("http", stream=stream)
    logging.getLogger("radixlm").error("GET /\x1b]0;owned\x07 größer\ttabs")
    assert stream.getvalue().endswith("GET /\\x1b]0;owned\\x07 größer\ttabs\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for stream, wanted in ((Terminal(), True), (io.StringIO(), False)):
        log.set_up_logging("http", stream=stream)
        logging.getLogger("radixlm").warning("careful")
        assert ("\x1b[33mWARNING\x1b[0m" in stream.getvalue()) is wanted
        assert re.sub(r"\x1b\[\d+m", "", stream.getvalue()).endswith("careful\n")
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        log.set_up_logging("http", stream=(stream := Terminal()))
        logging.getLogger("radixlm").warning("careful")
        assert "\x1b" not in stream.getvalue()


def test_json_is_an_object_a_line() -> None:
    stream = Terminal()
    log.set_up_logging("http", stream=stream, log_format="json")
    logging.getLogger("radixlm.x").info("a\n%s", "b", extra={"fields": {"status": 200}})
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("radixlm.x").exception("failed", stack_info=True)
    plain, failed = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}\+00:00", plain.pop("timestamp"))
    assert plain == {
        "level": "INFO",
        "target": "radixlm.x",
        "role": "http",
        "message": "a\nb",
        "status": 200,
    }
    assert "KeyError: 'gone'" in failed["error"] and failed["stack"].startswith("Stack")


def test_a_traceback_follows_its_record() -> None:
    stream = io.StringIO()
    log.set_up_logging("http", stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("radixlm").exception("failed", stack_info=True)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ERROR http: failed")
    assert lines[1].startswith("Traceback")
    assert "KeyError: 'gone'" in lines
    assert any(line.startswith("Stack (most recent call last)") for line in lines)


def test_a_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.set_up_logging("http", stream=first)
    log.set_up_logging("scheduler", "debug", stream=second)
    logging.getLogger("radixlm.x").debug("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert "scheduler: once" in second.getvalue()


def test_stderr_is_looked_up_when_a_record_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test runners and notebooks may replace stderr and close the old one."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)
    log.set_up_logging("http")
    logging.getLogger("radixlm.x").warning("one")
    assert "http: one" in first.getvalue()
    first.close()
    monkeypatch.setattr("sys.stderr", second)
    logging.getLogger("radixlm.x").warning("two")
    monkeypatch.undo()
    assert second.getvalue().count("\n") == 1 and "http: two" in second.getvalue()
    assert capsys.readouterr().err == "", "nothing went wrong with the log itself"


def test_levels() -> None:
    stream = io.StringIO()
    log.set_up_logging("http", "warning", "error", stream)
    logging.getLogger("radixlm.x").info("quiet")
    logging.getLogger("radixlm.x").warning("loud")
    logging.getLogger("uvicorn.error").warning("quiet")
    logging.getLogger("uvicorn.error").error("loud")
    assert "quiet" not in stream.getvalue()
    assert stream.getvalue().count("loud") == 2
    log.set_level("info")
    logging.getLogger("radixlm.x").info("audible")
    assert "audible" in stream.getvalue()


def test_third_parties_may_only_warn() -> None:
    stream = io.StringIO()
    log.set_up_logging("http", "debug", stream=stream)
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("httpx").warning("slow")
    assert "GET" not in stream.getvalue()
    assert "slow" in stream.getvalue()


def test_handlers_of_the_http_server_are_replaced() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler(stream))
    logging.getLogger("uvicorn.access").propagate = False
    log.set_up_logging("http", stream=stream)
    logging.getLogger("uvicorn.access").info("GET /health 200")
    assert stream.getvalue().count("GET /health 200") == 1


def test_python_warnings_become_records() -> None:
    stream = io.StringIO()
    log.set_up_logging("http", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("careful", UserWarning, stacklevel=1)
    assert "careful" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        log.set_up_logging("http", "loud")
