"""Options that the face reads: their values are those of the parsers, and bad ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.http import Face, face

from radixlm.base.errors import ConfigError
from radixlm.config.serve import REASONING_PARSERS, TOOL_CALL_PARSERS
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tools import registry as tools


def test_the_names_of_parsers_are_those_of_the_options() -> None:
    assert set(TOOL_CALL_PARSERS) == {"auto", "none", *tools.NAMES}
    assert set(REASONING_PARSERS) == {"auto", "none", *reasoning.NAMES}


async def test_parsers_are_found_named_or_off(toy_folder: Path) -> None:
    async with face(toy_folder, {}) as made:
        assert made.state.tool_format in ("qwen25", "hermes")
        assert made.state.reasoning_format == "qwen3"
    async with face(
        toy_folder, {}, tool_call_parser="mistral", reasoning_parser="deepseek-r1"
    ) as made:
        assert made.state.tool_format == "mistral"
        assert made.state.reasoning_format == "deepseek-r1"
    async with face(toy_folder, {}, tool_call_parser="none", reasoning_parser="none") as made:
        assert made.state.tool_format is None and made.state.reasoning_format is None


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": "/no/such/file"},
        {"completion_template": "no_such_name"},
        {"tool_call_parser": "telepathy"},
    ],
)
def test_bad_options_are_named_at_start(toy_folder: Path, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options.values()))):
        Face(toy_folder, {}, **options)


async def test_openai_defaults_by_flag(toy_folder: Path) -> None:
    async with face(toy_folder, {}) as made:
        assert made.state.defaults.temperature == 0.0, "the model's generation_config"
    async with face(toy_folder, {}, sampling_defaults="openai") as made:
        assert made.state.defaults.temperature == 1.0
