"""Module: the tree of layers. Plain attributes; the loader walks it, hot paths call ``run``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixlm.quant.param import Param


class Module:
    """A layer. Attributes that are Modules, lists of Modules, or Params form the tree.
    ``is_part``: its checkpoint holds more than it."""

    is_part = False
    contents: Contents | None = None  # of the root of a loaded tree

    def own_params(self) -> dict[str, Param]:
        """The layer's own parameters, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Param)}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Direct children as (name, module); lists contribute "name.index"."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def layers(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Every module of the tree with its path, children before parents (as loaders finish)."""
        for name, child in self.children():
            yield from child.layers(f"{path}.{name}" if path else name)
        yield path, self

    def finish(self) -> None:
        """Called once the layer's own parameters are filled: pack them, prepare to run."""


class Contents:
    """What loading has given the layers of a tree: the attributes that their ``finish`` set."""

    def __init__(self, root: Module) -> None:
        """``root``: without weights."""
        self.is_dropped = False
        self._before = [(layer, dict(vars(layer))) for _, layer in root.layers()]
        self._made: list[tuple[Module, dict[str, Any]]] = []

    def note(self) -> None:
        """The tree is loaded."""
        for layer, before in self._before:
            now = vars(layer)
            made = [name for name in now if name not in before or before[name] is not now[name]]
            self._made.append((layer, {name: before.get(name, self) for name in made}))
        self._before = []

    def drop(self) -> None:
        """Take it from the layers, which are then as they were before they were loaded. Whoever
        loads them again sets ``is_dropped``."""
        self.is_dropped = True
        for layer, made in self._made:
            for name, value in made.items():
                if value is self:  # it was not there
                    vars(layer).pop(name, None)
                else:
                    vars(layer)[name] = value


@contextmanager
def noting_contents(root: Module) -> Iterator[None]:
    """Within it, the tree is loaded."""
    contents = Contents(root)
    yield
    contents.note()
    root.contents = contents
