"""Shadow: a copy of a loaded tree of layers that is filled with other weights beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from radixlm.layers.module import Module
from radixlm.quant.param import Param


class Shadow:
    """``root`` has the layers of ``original``, with empty parameters. Once the loader has filled
    it, ``publish`` gives the originals what their copies hold; until then they are untouched.

    A layer's weights are the attributes that its ``finish`` sets. A bound method among them is
    bound to the original again, so that what is set there later (adapters, say) still counts.
    """

    def __init__(self, original: Module) -> None:
        self._copies: dict[int, Module] = {}
        self._params: dict[int, Param] = {}
        self._originals: dict[int, Module] = {}
        self.root = self._copy(original)
        # what loads a model calls this last; it may change what both trees share
        vars(self.root)["finish"] = lambda: None
        self._before = {id(copy): dict(vars(copy)) for copy in self._copies.values()}

    def _copy(self, original: Module) -> Module:
        found = self._copies.get(id(original))
        if found is None:
            self._copies[id(original)] = found = object.__new__(type(original))
            self._originals[id(found)] = original
            values = {name: self._copied(value) for name, value in vars(original).items()}
            vars(found).update(values)
        return found

    def _copied(self, value: Any) -> Any:
        """Modules, parameters and plain containers of them as copies; all else is shared."""
        if isinstance(value, Module):
            return self._copy(value)
        if isinstance(value, Param):
            if id(value) not in self._params:
                self._params[id(value)] = _empty(value)
            return self._params[id(value)]
        if type(value) in (list, tuple):
            parts = [self._copied(part) for part in value]
            is_same = all(part is old for part, old in zip(parts, value, strict=True))
            return value if is_same and type(value) is tuple else type(value)(parts)
        if type(value) is dict:
            return {key: self._copied(part) for key, part in value.items()}
        return value

    def _home(self, value: Any) -> Any:
        """``value`` of a copy as the original has it: bound to original layers."""
        if isinstance(value, Module):
            return self._originals.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in self._originals:
            return MethodType(value.__func__, self._originals[id(value.__self__)])
        if type(value) in (list, tuple):
            return type(value)(self._home(part) for part in value)
        if type(value) is partial:
            parts = (self._home(part) for part in value.args)
            keywords = {name: self._home(part) for name, part in value.keywords.items()}
            return partial(self._home(value.func), *parts, **keywords)
        return value

    def complete(self) -> Module:
        """The copy, fit to run: what reads weights of a whole model may use it."""
        del vars(self.root)["finish"]
        self.root.finish()
        return self.root

    def publish(self) -> Callable[[], None]:
        """What gives the originals what their copies hold; it cannot fail."""
        changes = list(self.changes())

        def publish() -> None:
            for layer, values in changes:
                vars(layer).update(values)
            self._originals[id(self.root)].finish()

        return publish

    def changes(self) -> Iterator[tuple[Module, dict[str, Any]]]:
        """Each original layer with the attributes that loading has given its copy."""
        for copy in self._copies.values():
            before = self._before[id(copy)]
            changed = {
                name: self._home(value)
                for name, value in vars(copy).items()
                if name not in before or before[name] is not value
            }
            if changed:
                yield self._originals[id(copy)], changed


def _empty(param: Param) -> Param:
    return Param(
        param.shape,
        param.storage,
        param.shard,
        accepts_quantized=param.accepts_quantized,
        cuts=param.cuts,
    )
