"""config_defaults.json is what scripts/config-defaults writes."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from radixlm.arch.config_defaults import ALIASES, COMMON, defaults, model_types

SCRIPT = Path(__file__).parents[2] / "scripts" / "config-defaults"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_loader("it", SourceFileLoader("it", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_current(script: ModuleType) -> None:
    written = script.OUTPUT.read_text()
    assert written == script.text(script.make(script.entries())), "run scripts/config-defaults"


def test_the_hand_list_repeats_no_class(script: ModuleType) -> None:
    """A value stands in it because the class has no such field, or another value."""
    for model_type, values in script.BY_HAND.items():
        if model_type in CONFIG_MAPPING:
            architecture = str(defaults()[model_type]["architecture"])
            of_class = script.of_class(CONFIG_MAPPING[model_type], architecture)
            same = [key for key, value in values.items() if of_class.get(key, "none") == value]
            assert same == [], model_type


def test_values_are_those_of_an_empty_config() -> None:
    """But for what a class works out from other keys."""
    for model_type, values in defaults().items():
        if model_type in CONFIG_MAPPING:
            empty = CONFIG_MAPPING[model_type]()
            for key in values.keys() & {"vocab_size", "hidden_size"}:
                spelled = [one for one in (key, *ALIASES[key]) if hasattr(empty, one)]
                assert getattr(empty, spelled[0]) == values[key], (model_type, key)


def test_keys_have_their_common_names() -> None:
    others = {other for others in ALIASES.values() for other in others}
    assert not others & COMMON.keys()
    assert [name for name, values in defaults().items() if others & values.keys()] == []


def test_each_architecture_has_one_model_type() -> None:
    assert len(model_types()) == len(defaults())
