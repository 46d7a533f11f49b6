"""Which client the current request comes from, so that clients can have their fair share."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from radixlm.base.thread_pool import FairThreadPool

T = TypeVar("T")

_client: ContextVar[str] = ContextVar("client", default="")


def set_client(name: str) -> None:
    """Name the client of the current task, which tasks and calls made from it inherit."""
    _client.set(name)


def current_client() -> str:
    """The client's name; "" outside of a request."""
    return _client.get()


async def run_in(pool: FairThreadPool, function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` in a pool whose keys are the client alone."""
    return await pool.run((current_client(),), function, *args)
