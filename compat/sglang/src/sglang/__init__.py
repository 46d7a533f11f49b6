"""The name ``sglang`` for programs of the frontend language; RadixLM runs them."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import radixlm
from radixlm import __version__ as __version__

# modules that are RadixLM's own, under SGLang's names
_SAME = {
    "sglang.lang": "radixlm.lang",
    "sglang.global_config": "radixlm.lang.global_config",
    "sglang.api": "radixlm.lang.api",
}
# programs that are run by ``python -m``
_PROGRAMS = frozenset(
    "bench_offline_throughput bench_one_batch bench_one_batch_server bench_serving check_env "
    "launch_server profiler".split()
)
__all__ = list(radixlm.__all__)


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module of RadixLM under SGLang's name: the same object, so that its classes are the
    same."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        program = name.removeprefix("sglang.")
        if program in _PROGRAMS:
            real_spec = importlib.util.find_spec(f"radixlm.{program}")
            assert real_spec is not None
            return importlib.util.spec_from_file_location(name, real_spec.origin)
        for ours, theirs in _SAME.items():
            if name == ours or name.startswith(f"{ours}."):
                real = theirs + name.removeprefix(ours)
                if importlib.util.find_spec(real) is not None:
                    return importlib.machinery.ModuleSpec(name, self, origin=real)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import has replaced


sys.meta_path.insert(0, _Alias())  # before the finder of files, which would make a second module

# as in SGLang the attribute is the object: an import of the module of that name would set it
global_config = importlib.import_module("sglang.global_config").global_config


def __getattr__(name: str) -> Any:
    return getattr(radixlm, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(radixlm)})
