"""The registry of architectures is cheap to import and complete."""

from __future__ import annotations

import subprocess
import sys

from radixlm.arch.families.encoders import ENCODERS
from radixlm.arch.registry import (
    ARCHITECTURES,
    CONFIG_CONVERTERS,
    DRAFTS,
    MTP_LAYERS,
    find,
)
from radixlm.arch.registry import family_function as function


def test_no_heavy_package_is_imported() -> None:
    code = (
        "import sys, radixlm.arch.hf\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_module_of_a_family_is_imported() -> None:
    code = (
        "import sys; from radixlm.arch.hf import describe\n"
        "describe({'architectures': ['LlamaForCausalLM'], 'hidden_size': 8, 'vocab_size': 8,"
        " 'num_hidden_layers': 1, 'num_attention_heads': 1})\n"
        "names = [m.rpartition('.')[2] for m in sys.modules if 'arch.families.' in m]\n"
        "print('llama' in names, {'gemma', 'encoders', 'heads', 'drafts', 'linear'} & set(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True set()"


def test_every_row_names_a_function_that_is_there() -> None:
    converters = [function(row) for row in CONFIG_CONVERTERS.values()]
    drafts = [function(row) for row in (*DRAFTS.values(), *MTP_LAYERS.values())]
    assert all(map(callable, (*converters, *drafts, *map(find, ARCHITECTURES))))


def test_models_with_multi_token_prediction_are_architectures() -> None:
    assert MTP_LAYERS.keys() <= ARCHITECTURES.keys()


def test_every_encoder_has_all_names() -> None:
    ends = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    rows = {f"{stem}{end}" for stem in ENCODERS for end in ends}
    assert rows == {name for name, row in ARCHITECTURES.items() if row.startswith("encoders:")}


def test_families_are_documented_by_their_lineage() -> None:
    for name in ARCHITECTURES:
        module = sys.modules[find(name).__module__]
        assert module.__doc__, module.__name__
