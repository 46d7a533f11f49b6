"""The memory that a loaded model's weights take, as its layers have packed them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def stored_bytes(root: Any) -> int:
    """Bytes of all tensors, and all memory of the C++ kernels, that ``root`` reaches; memory that
    two layers share counts once."""
    total, seen = 0, set[int]()
    for item in reachable(root):
        if not isinstance(item, Tensor):
            total += int(item.num_bytes)
            continue
        storage = item.untyped_storage()
        if storage.data_ptr() not in seen:
            total += storage.nbytes()
        seen.add(storage.data_ptr())
    return total


def reachable(root: Any) -> Iterator[Any]:
    """Tensors, and memory of the C++ kernels, that ``root`` reaches through attributes, lists,
    tuples and dicts."""
    seen, stack = set[int](), [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif type(item).__module__.startswith("radixlm"):
            if hasattr(item, "address") and hasattr(item, "num_bytes"):
                yield item
            stack.extend(_attributes(item))


def _attributes(item: Any) -> list[Any]:
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, n, None) for n in slots)]
