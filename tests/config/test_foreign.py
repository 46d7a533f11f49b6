"""Flags of vLLM and llama.cpp are refused with the name that they have here."""

from __future__ import annotations

import re

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.flat_options import read_values
from radixlm.config.foreign import _table, of_others
from radixlm.config.newer import newer_flags
from radixlm.config.option import names
from radixlm.config.parser import parse


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("--max-model-len", "--context-length"),
        ("--max_model_len=4096", "--context-length"),
        ("--gpu-memory-utilization", "--mem-fraction-static"),
        ("--no-enable-prefix-caching", "--disable-radix-cache"),
        ("-tp", "--tp-size"),
        ("-ngl", "--cpu-offload-gb"),
        ("--ctx-size", "--context-length"),
        ("--no-mmap", "leave it out"),
        ("--worker-cls", "leave it out"),
    ],
)
def test_the_message_says_what_it_is_here(word: str, here: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([word])
    said = str(caught.value)
    assert said.startswith(f"the flag {word.partition('=')[0]}".replace("max_model_len", "max"))
    assert here in said and "\n" not in said


def test_keys_of_yaml_and_python() -> None:
    for key in ("max-model-len", "max_model_len"):
        with pytest.raises(ConfigError, match=rf"{key} is vLLM's; here it is --context-length$"):
            read_values({key: 4096})


def test_what_is_named_exists() -> None:
    ours = {*names(), "data_parallel_size"}
    named = {flag for text in _table().values() for flag in re.findall(r"--([a-z0-9-]+)", text)}
    assert named and {flag.replace("-", "_") for flag in named} <= ours
    assert len(_table()) > 260


def test_no_name_of_ours_is_called_anothers() -> None:
    assert not {*names(), *DEPRECATED, *newer_flags()} & {*_table()}
    assert of_others("--prot") == "" and of_others("port") == ""
