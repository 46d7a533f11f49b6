"""Fields of vLLM's and llama.cpp's requests that stand for a sampling parameter of ours.

``OF_SAMPLING`` maps a field to a function that gives the parameters it stands for. They hold in
``sampling_params`` and, under the names there, in the bodies of OpenAI's routes. A field of ours
in the same request takes precedence.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from radixlm.base.errors import InvalidRequest

Parameters = dict[str, Any]
_META = re.compile(r"([.^$*+?{}\[\]\\|()])")


def _same(target: str) -> Callable[[str, Any], Parameters]:
    return lambda name, value: {target: value}


def _limit(name: str, value: Any) -> Parameters:
    """llama.cpp's -1 (no limit) and -2 (the context) are "until the context is full"."""
    is_endless = isinstance(value, int) and value < 0
    return {} if is_endless else {"max_new_tokens": value}


def _choice(name: str, value: Any) -> Parameters:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise InvalidRequest(f"{name} must be a list of strings", name)
    return {"regex": "(" + "|".join(_META.sub(r"\\\1", one) for one in value) + ")"}


def _any_json(name: str, value: Any) -> Parameters:
    return {"json_schema": {"type": "object"}} if value else {}


_STRUCTURED: Mapping[str, Callable[[str, Any], Parameters]] = {
    "json": _same("json_schema"),
    "json_object": _any_json,
    "regex": _same("regex"),
    "choice": _choice,
    "grammar": _same("ebnf"),
    "structural_tag": _same("structural_tag"),
}


def _structured(name: str, value: Any) -> Parameters:
    """vLLM's ``structured_outputs``: an object with one kind of constraint."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object, such as {{'regex': '[0-9]+'}}", name)
    found: Parameters = {}
    for kind, one in value.items():
        if kind not in _STRUCTURED and kind not in _OF_VLLM:
            raise InvalidRequest(
                f"{name}.{kind:.60}: must be one of {', '.join(_STRUCTURED)}", name
            )
        if one is not None and kind in _STRUCTURED:
            found |= _STRUCTURED[kind](f"{name}.{kind}", one)
    return found


# how vLLM's own grammars are compiled
_OF_VLLM = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties",
            "whitespace_pattern")  # fmt: skip


OF_SAMPLING: Mapping[str, Callable[[str, Any], Parameters]] = {
    "guided_json": _same("json_schema"),
    "guided_json_object": _any_json,
    "guided_regex": _same("regex"),
    "guided_choice": _choice,
    "guided_grammar": _same("ebnf"),
    "structured_outputs": _structured,
    "grammar": _same("ebnf"),
    "include_stop_str_in_output": _same("no_stop_trim"),
    "max_tokens": _limit,
    "max_completion_tokens": _limit,
    "n_predict": _limit,
    "min_tokens": _same("min_new_tokens"),
    "repeat_penalty": _same("repetition_penalty"),
    "seed": _same("sampling_seed"),
}


def sampling_of_foreign(name: str, value: Any) -> Parameters | None:
    """The sampling parameters that a field stands for; None for a field that is not in the table.
    InvalidRequest for a value of the wrong form."""
    convert = OF_SAMPLING.get(name)
    if convert is None:
        return None
    return {} if value is None else convert(name, value)
