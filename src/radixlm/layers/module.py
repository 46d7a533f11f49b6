"""Module: the tree of layers. Plain attributes; the loader walks it, hot paths call ``run``."""

from __future__ import annotations

from collections.abc import Iterator

from radixlm.quant.param import Param


class Module:
    """A layer. Attributes that are Modules, lists of Modules, or Params form the tree.
    ``is_part``: its checkpoint holds more than it."""

    is_part = False

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
