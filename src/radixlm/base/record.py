"""Frozen records. Defining one takes 15 us, a frozen dataclass with slots 600, and a start defines
two hundred of them."""

from typing import dataclass_transform

from msgspec import Struct, field
from msgspec.structs import replace

__all__ = ["Record", "field", "replace"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record(Struct, frozen=True):
    """Like a frozen dataclass with slots: ordered fields, equality, hash, ``replace``."""
