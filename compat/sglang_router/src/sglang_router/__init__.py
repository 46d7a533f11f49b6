"""The module names of sglang-router 0.3.2, served by RadixLM's gateway."""

from radixlm.base.lazy import load
from sglang_router.version import __version__

__all__ = ["Router", "RouterArgs", "__version__"]

_LAZY = {
    "Router": "sglang_router.router:Router",
    "RouterArgs": "sglang_router.router_args:RouterArgs",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return load(_LAZY[name])
    raise AttributeError(f"module 'sglang_router' has no attribute {name!r}")
