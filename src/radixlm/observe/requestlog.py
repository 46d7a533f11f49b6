"""Log lines of received and of finished requests."""

import json
import logging
from typing import Any

import msgspec

log = logging.getLogger("radixlm.requests")

SHORT_CHARS = 2048
LEVELS = (0, 1, 2, 3)


def received(rid: str, level: int, num_tokens: int, sampling: Any, prompt: str | None) -> None:
    """``level`` 0: metadata, 1: sampling parameters too, 2: the start of the prompt, 3: all."""
    parts = [f"received {rid}: {num_tokens} prompt tokens"]
    if level >= 1:
        parts.append(f"sampling {msgspec.json.encode(sampling).decode()}")
    if level >= 2 and prompt is not None:
        parts.append(f"prompt {_shown(prompt, level)}")
    log.info("%s", "; ".join(parts))


def finished(rid: str, level: int, facts: dict[str, Any], output: str | None) -> None:
    """``facts``: reason, tokens, seconds ... in the order in which they are shown."""
    shown = ", ".join(f"{name} {value}" for name, value in facts.items())
    parts = [f"finished {rid}: {shown}"]
    if level >= 2 and output is not None:
        parts.append(f"output {_shown(output, level)}")
    log.info("%s", "; ".join(parts))


def time_stats(
    rid: str, role: str, lengths: tuple[int, int], spans_s: dict[str, float], start_time: float
) -> None:
    """One line with SGLang's words. ``role``: unified, prefill or decode; ``lengths``: of input
    and output; ``spans_s``: name -> seconds; ``start_time``: seconds since the epoch."""
    head = f"rid={rid}, input len={lengths[0]}, output len={lengths[1]}, type={role}"
    spans = "".join(f"{name}={1e3 * seconds:.2f}ms, " for name, seconds in spans_s.items())
    log.info("Req Time Stats(%s): %sstart_time=%s", head, spans, start_time)


def _shown(text: str, level: int) -> str:
    if level >= 3 or len(text) <= SHORT_CHARS:
        return _quoted(text)
    half = SHORT_CHARS // 2
    return f"{_quoted(text[:half])} ... {_quoted(text[-half:])} ({len(text)} characters)"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
