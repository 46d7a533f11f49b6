"""Optional packages that only some media need."""

import importlib
from typing import Any

from radixlm.base.errors import InvalidRequest


def extra(name: str, where: str, needs: str) -> Any:
    """The module; InvalidRequest naming ``where`` with what it ``needs`` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidRequest(f"{where}: {needs}", where) from None
