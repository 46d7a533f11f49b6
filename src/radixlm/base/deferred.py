"""Modules that another module imports but seldom uses, run when something asks for what is in
them."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# What torch needs to compile, to compute shapes alone, and before it makes a ``torch.Generator``:
# engines defer it, a fifth of the time that torch takes to import.
TORCH_SHAPES = "torch._meta_registrations"


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for these
            raise AttributeError(name)
        return getattr(run_deferred(self.__name__), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""


def defer(name: str) -> None:
    """Let the next import of this module, which is no package, wait for ``run_deferred``, or for
    the first look into it."""
    sys.meta_path.insert(0, _Finder(name))


def run_deferred(name: str) -> ModuleType:
    """The module itself, for callers that need what its import registers."""
    sys.meta_path[:] = [
        one for one in sys.meta_path if not (isinstance(one, _Finder) and one.name == name)
    ]
    if isinstance(sys.modules.get(name), _Deferred):
        del sys.modules[name]
    return importlib.import_module(name)
