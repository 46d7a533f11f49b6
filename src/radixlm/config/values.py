"""Converts text, YAML and Python values to option values; errors name a value that works."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.nearest import suggestion
from radixlm.config.option import Option, options

logger = logging.getLogger(__name__)

_KIND_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_BOOLS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLS |= {"false": False, "no": False, "off": False, "0": False}


def show(option: Option, value: Any) -> str:
    """``value`` as a user would write it; secrets are hidden."""
    if option.flag.is_secret and value is not None:
        return "***"
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else str(value)


def bounds(interval: str) -> tuple[float, float]:
    """ "[1, inf)" -> (1, inf)."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def is_within(value: float, interval: str) -> bool:
    """Whether ``value`` lies in an interval written as "[low, high)"; NaN lies in none."""
    low, high = bounds(interval)
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def example(option: Option) -> str:
    """A value that works, as text."""
    flag = option.flag
    choices = flag.built or flag.allowed
    if option.default not in (None, "", ()):
        return show(option, option.default)
    if choices:
        return str(choices[0])
    if flag.is_json:
        return '{"key": 1}'
    if option.kind is bool:
        return "true"
    if option.kind is str:
        return "text"
    low, high = bounds(flag.within or "[1, inf)")
    middle = low + 1 if math.isinf(high) else (low + high) / 2
    return str(option.kind(middle))


def invalid_value(option: Option, problem: str) -> ConfigError:
    """The error "--flag: problem; a value that works: ..."."""
    return ConfigError(f"{option.dashed}: {problem}; a value that works: {example(option)}")


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _BOOLS[value.strip().lower()]
    raise ValueError


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _read_str(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


_READERS: dict[type, Callable[[Any], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
}


def _check_json(option: Option, text: str) -> None:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise invalid_value(option, f"not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise invalid_value(option, f"expected a JSON object, got {type(parsed).__name__}")


def _plain(name: str) -> str:
    """What counts of a choice: neither case nor how its words are joined."""
    return name.lower().replace("-", "").replace("_", "")


def _choose(option: Option, value: Any) -> Any:
    """Map a deprecated value and check the choices."""
    flag = option.flag
    new = dict(flag.old_values).get(value)
    if new is not None:
        logger.warning("%s %s is taken as %s", option.dashed, value, new)
        return new
    if isinstance(value, str) and value not in flag.allowed:
        value = {_plain(str(choice)): choice for choice in flag.allowed}.get(_plain(value), value)
    if value not in flag.allowed:
        known = [str(choice) for choice in flag.allowed]
        near = suggestion(str(value), known)
        if option.name == "dtype" and value in options()["quantization"].flag.allowed:
            near = f"; for weights in {value}: --quantization {value}"
        raise ConfigError(f"{option.dashed}: {value!r} is not one of {', '.join(known)}{near}")
    return value


def _one(option: Option, value: Any) -> Any:
    """One value of the option's kind, inside its limits."""
    shown = "***" if option.flag.is_secret else repr(value)
    if isinstance(value, Mapping) and not (option.flag.is_json or option.name == "lora_paths"):
        raise invalid_value(option, f"{shown} is not {_KIND_NAMES[option.kind]}")
    try:
        read = _READERS[option.kind](value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise invalid_value(option, f"{shown} is not {_KIND_NAMES[option.kind]}") from None
    if option.flag.allowed:
        read = _choose(option, read)
    if option.flag.within and not is_within(read, option.flag.within):
        raise invalid_value(option, f"{shown} is not in {option.flag.within}")
    if option.flag.is_json and not (option.flag.may_be_file and read.startswith("@")):
        _check_json(option, read)
    return read


def _is_unset(option: Option, value: Any) -> bool:
    """Whether ``value`` means "unset": None, or "none", "null", "auto" for nullable options."""
    if value is None or not option.is_nullable or "none" in option.flag.allowed:
        return value is None
    words = {"None"} if option.kind is str else {"None", "none", "null", "auto"}
    return isinstance(value, str) and value in words


def coerce(option: Option, value: Any) -> Any:
    """``value`` (text or Python object) as the option's type; ConfigError naming the flag."""
    if _is_unset(option, value):
        return option.default
    if not option.is_many:
        return _one(option, value)
    if isinstance(value, Mapping) and option.name == "lora_paths":
        value = [f"{name}={path}" for name, path in value.items()]
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_one(option, item) for item in items)
