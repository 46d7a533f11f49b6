"""Identity: whose request this task works on, and what of the server that client may see.

The HTTP server sets it for each request; tasks that a request starts inherit it. Outside of a
request, and on a server without keys, everybody is the operator.
"""

import hashlib
from contextvars import ContextVar

from radixlm.base.record import Record

_HASH_CHARS = 32


class Identity(Record):
    """``owner``: hash of the client's key, "" without a key. Objects belong to an owner: files,
    batches, stored responses, sessions and running requests."""

    owner: str = ""
    is_admin: bool = True
    has_own_cache: bool = False  # --isolate-cache-by key

    @property
    def tenant(self) -> str | None:
        """What separates its cached prefixes from those of other clients."""
        return self.owner if self.has_own_cache else None

    def may_see(self, owner: str) -> bool:
        """Whether it may read, change and end what belongs to ``owner``."""
        return self.is_admin or owner == self.owner


_OPERATOR = Identity()
_current: ContextVar[Identity] = ContextVar("identity", default=_OPERATOR)


def identity() -> Identity:
    """Whose request this task works on."""
    return _current.get()


def set_identity(new: Identity) -> None:
    """From here on this task works for ``new``."""
    _current.set(new)


def owner_of(key: str) -> str:
    """The name under which the objects of an API key are stored."""
    return hashlib.sha256(b"radixlm API key\0" + key.encode()).hexdigest()[:_HASH_CHARS]
