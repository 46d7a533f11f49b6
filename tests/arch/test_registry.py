"""The table of families costs nothing heavy to import."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

from radixlm.arch import families
from radixlm.arch.families import builders
from radixlm.arch.families.builders import Lazy
from radixlm.arch.families.lineages import FORMS, LINEAGES
from radixlm.arch.registry import FAMILIES


def test_no_heavy_package_is_imported() -> None:
    code = (
        "import sys, radixlm.arch.hf\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_family_is_described_by_its_own_lineage_alone() -> None:
    code = (
        "import sys; from radixlm.arch.hf import describe\n"
        "describe({'architectures': ['LlamaForCausalLM'], 'hidden_size': 8, 'vocab_size': 8,"
        " 'num_hidden_layers': 1, 'num_attention_heads': 1})\n"
        "names = [m.rpartition('.')[2] for m in sys.modules if 'arch.families.' in m]\n"
        "print('llama' in names, {'gemma', 'encoder', 'heads', 'drafts', 'linear'} & set(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True set()"


@pytest.mark.parametrize(
    ("table", "listed"), [(builders.FAMILIES, LINEAGES), (builders.FORMED, FORMS)]
)
def test_modules_register_what_is_listed_and_nothing_else(
    table: Lazy[object], listed: dict[str, str]
) -> None:
    for module in pkgutil.iter_modules(families.__path__):
        import_module(f"{families.__name__}.{module.name}")
    found: dict[str, set[str]] = {}
    for name, one in table.registered.items():
        found.setdefault(one.__module__.rpartition(".")[2], set()).add(name)
    assert found == {module: set(names.split()) for module, names in listed.items()}


def test_families_are_documented_by_their_lineage() -> None:
    for describe in FAMILIES.values():
        module = sys.modules[describe.__module__]
        assert module.__doc__, module.__name__
