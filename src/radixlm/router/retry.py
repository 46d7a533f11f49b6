"""What a failed try was, and what follows."""

from __future__ import annotations

import random

from radixlm.base.record import Record
from radixlm.router.answer import error_answer
from radixlm.router.call import Headers
from radixlm.router.exchange import Cut, NoDescriptor, WorkerFailure
from radixlm.router.options import Options

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
BUSY = frozenset((429, 503))
JSON = (b"content-type", b"application/json")


class Failure(Record):
    """A try without a good answer, and the answer that the client gets if it is the last one.
    ``is_at_once``: another worker may do better, without a wait. ``is_final``: none would."""

    status: int
    headers: Headers
    body: bytes
    error_type: str = "backend_error"  # label of metrics
    message: str = ""  # what a stream that has begun is told
    code: str = ""
    retry_after_s: float = 0.0
    is_at_once: bool = False
    is_final: bool = False
    is_own: bool = False  # of the gateway, not of a worker


def told(
    status: int,
    message: str,
    code: str,
    error_type: str,
    *,
    retry_after_s: float = 0.0,
    is_at_once: bool = False,
    is_final: bool = False,
) -> Failure:
    """A failure in the gateway's own words. ``retry_after_s``: for the client."""
    kind = "overloaded_error" if status == 503 else "server_error"
    answer = error_answer(status, message, code, kind=kind, retry_after_s=retry_after_s or None)
    assert isinstance(answer.body, bytes)
    return Failure(
        status,
        [JSON, (b"x-smg-error-code", code.encode()), *answer.headers],
        answer.body,
        error_type,
        message,
        code,
        is_at_once=is_at_once,
        is_final=is_final,
        is_own=True,
    )


def of_error(error: WorkerFailure) -> Failure:
    """A worker that gave no whole answer."""
    if error.is_timeout:
        return told(504, str(error), "timeout", "timeout", is_final=True)
    if isinstance(error, NoDescriptor):
        return told(503, str(error), "overloaded", "backend_error", retry_after_s=1.0)
    code = "worker_connection_lost" if isinstance(error, Cut) else "worker_unreachable"
    return told(502, str(error), code, "backend_error", is_at_once=True)


def of_answer(status: int, headers: Headers, body: bytes) -> Failure:
    """A worker's answer with a status of an error."""
    return Failure(
        status,
        headers,
        body,
        message=f"the worker answered {status}",
        code="worker_error",
        retry_after_s=retry_after(headers),
        is_at_once=status in BUSY,
        # the engine has tried it twice; each worker would lose its engine to it
        is_final=status not in RETRIED or b'"engine_error"' in body,
    )


def retry_after(headers: Headers) -> float:
    """Seconds of Retry-After; 0 without one, or for a date."""
    value = next((value for name, value in headers if name == b"retry-after"), b"")
    return float(value) if value.isdigit() else 0.0


def backoff(options: Options, attempt: int) -> float:
    """Seconds before try ``attempt`` (from 2): grows by a factor, with a random share."""
    factor = options.retry_backoff_multiplier ** min(attempt - 2, 32)
    wait_ms = min(options.retry_initial_backoff_ms * factor, options.retry_max_backoff_ms)
    return wait_ms * (1 + random.uniform(-1, 1) * options.retry_jitter_factor) / 1000
