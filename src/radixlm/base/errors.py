"""Every error that RadixLM raises on purpose.

RadixError
├── ConfigError          bad or impossible options: exit 2, names the flag and a value that works
├── CheckpointError      weights do not fit the description: exit 2, names both sides
├── RequestError         an error of the client; ``status`` is the HTTP status
│   ├── InvalidRequest   400; ``param`` names the field; a ValueError too
│   │   └── PromptTooLong
│   ├── Unauthorized     401
│   ├── Forbidden        403
│   ├── NotFound         404
│   │   └── ModelNotFound
│   ├── PayloadTooLarge  413
│   ├── TooManyRequests  429; ``retry_after_s``
│   ├── Aborted          499
│   ├── NotSupported     501; the message names the flag or the feature that is missing
│   └── Overloaded       503; ``retry_after_s``
├── EngineError          500: the engine failed this request (it killed the engine twice, NaN, ...)
├── TransferError        a peer failed; retryable
├── RankLost             a rank of this replica is gone or silent: the replica is replaced
└── InvariantError       a bug: an invariant is violated
"""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
}


def anthropic_type(status: int) -> str:
    """The type that an error of this HTTP status has in Anthropic's API."""
    return ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


class RadixError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RadixError, ValueError):
    """Bad or impossible options; the message names the flag and a value that works. A ValueError
    too, as SGLang's ServerArgs raises."""


class CheckpointError(RadixError):
    """Weights or config.json do not fit the description; the message names file and tensor."""


DOWNLOAD_AGAIN = "; download or copy the file again"
"""How a message about a file that is cut off ends."""


class TransferError(RadixError):
    """A peer failed; the transfer may be tried again."""


class RankLost(RadixError):
    """A rank of this replica is gone or silent, so that no collective can end; says which."""


class InvariantError(RadixError):
    """An invariant is violated, which is a bug; the message has both numbers."""


class EngineError(RadixError):
    """The engine failed this one request."""

    status = 500
    code = "engine_error"


class RequestError(RadixError):
    """An error of the client. ``param`` names the field, ``status`` the HTTP status."""

    status = 400
    code: str | None = None

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError, ValueError):
    """A field has a value that cannot be served. A ValueError too, as SGLang's Engine raises."""

    code = "invalid_value"


class PromptTooLong(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, exceed the context."""

    code = "context_length_exceeded"

    @staticmethod
    def maximum(num_tokens: int) -> str:
        """OpenAI's words, by which clients know the error."""
        return f"This model's maximum context length is {num_tokens} tokens"


class Unauthorized(RequestError):
    """A key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is valid but not for this endpoint."""

    status = 403
    code = "forbidden"


class NotFound(RequestError):
    """No such object."""

    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    """No such model or adapter."""

    code = "model_not_found"


class PayloadTooLarge(RequestError):
    """The request body exceeds the limit."""

    status = 413
    code = "payload_too_large"


class TooManyRequests(RequestError):
    """More at once than is allowed."""

    status = 429
    code = "rate_limit_exceeded"


class QueueFull(TooManyRequests):
    """The queue is full: 503 as in SGLang; --queue-full-status for routes under /v1."""

    status = 503
    code = "queue_full"


class Aborted(RequestError):
    """The request was aborted by the client or by an operator."""

    status = 499
    code = "aborted"


class NotSupported(RequestError):
    """The feature is not built or not switched on; the message says which flag."""

    status = 501
    code = "not_supported"


class Overloaded(RequestError):
    """Not now: starting, draining, restarting or out of capacity."""

    status = 503
    code = "overloaded"


def reason(error: Exception) -> str:
    """What an error says, without the number and the path that an OSError puts around it."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
