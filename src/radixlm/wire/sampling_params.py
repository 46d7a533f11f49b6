"""SamplingParams: what a client asks of the sampler, the stop rules and the grammar of one request.

The rows SP-01 .. SP-22 of the native API. ``from_dict`` reads a JSON object (unknown names are
refused), ``validate`` checks every bound; both raise InvalidRequest naming the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from radixlm.base.errors import InvalidRequest, NotSupported

MAX_PARALLEL_SAMPLES = 1024
MAX_STOPS = 1024
MAX_STOP_CHARS = 16384  # of all items together: a matcher is built of them
MAX_GRAMMAR_CHARS = 4 << 20
GREEDY_BELOW = 1e-6  # a temperature below this is greedy: dividing by it would overflow
ANY_JSON_OBJECT = "$$ANY$$"
_INT64 = (-(1 << 63), (1 << 63) - 1)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a client may set. ``max_new_tokens`` None means "until the context is full"."""

    max_new_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    custom_params: dict[str, Any] | None = None
    sampling_seed: int | None = None

    @classmethod
    def from_dict(
        cls, mapping: Mapping[str, Any], base: SamplingParams | None = None
    ) -> SamplingParams:
        """Read a JSON object over ``base`` (the defaults). A null keeps the default.

        Accepts the shapes clients send: one string or a list for the stops, string keys in
        logit_bias, an object instead of a JSON string for json_schema and structural_tag.
        """
        values = {}
        for name, value in mapping.items():
            if name in _UNSUPPORTED:
                _UNSUPPORTED[name](value)
            elif name not in cls.__struct_fields__:
                raise InvalidRequest(f"unknown sampling parameter {name!r}", param=str(name))
            elif value is not None:
                values[name] = _READERS[name](name, value)
        return msgspec.structs.replace(base or _DEFAULTS, **values)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken: temperature 0 or top_k 1."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def needs_penalties(self) -> bool:
        """Whether token counts change the logits."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest(param=...) for the first value that cannot be served."""
        for name, (low, high, open_low) in _BOUNDS.items():
            _check_bounds(name, getattr(self, name), low, high, open_low)
        for name in _FLAGS:
            _read_bool(name, getattr(self, name))
        if self.top_k != -1 and self.top_k < 1:
            raise InvalidRequest(f"top_k must be -1 or at least 1, got {self.top_k}", "top_k")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed "
                f"max_new_tokens ({self.max_new_tokens})",
                "min_new_tokens",
            )
        self._check_stops(vocab_size)
        self._check_logit_bias(vocab_size)
        self._check_grammars()

    def _check_stops(self, vocab_size: int) -> None:
        for name in ("stop", "stop_regex"):
            stops = getattr(self, name)
            if len(stops) > MAX_STOPS:
                raise InvalidRequest(f"{name} has {len(stops)} items, at most {MAX_STOPS}", name)
            for text in stops:
                _read_str(name, text)
                if not text:
                    raise InvalidRequest(f"{name} must not contain an empty string", name)
            num_chars = sum(map(len, stops))
            if num_chars > MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"{name} has {num_chars} characters, at most {MAX_STOP_CHARS}", name
                )
        for token in self.stop_token_ids:
            _check_token("stop_token_ids", token, vocab_size)

    def _check_logit_bias(self, vocab_size: int) -> None:
        for token, bias in (self.logit_bias or {}).items():
            _check_token("logit_bias", token, vocab_size)
            if not math.isfinite(_read_float("logit_bias", bias)):
                raise InvalidRequest(f"logit_bias of token {token} must be finite", "logit_bias")

    def _check_grammars(self) -> None:
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            message = "Only one of regex, json_schema, or ebnf can be set."
            if "structural_tag" in given:
                message = f"Only one of {' and '.join(given)} can be set."
            raise InvalidRequest(message, given[-1])
        for name in given:
            text = _read_str(name, getattr(self, name))
            if len(text) > MAX_GRAMMAR_CHARS:
                raise InvalidRequest(
                    f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS}", name
                )


def parallel_seed(seed: int, index: int) -> int:
    """The seed of parallel sample ``index`` (n > 1) of a request; sample 0 keeps ``seed``.

    The rest follow splitmix64 (Steele, Lea, Flood 2014), read as a signed 64-bit integer.
    """
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    x = (seed + index * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


_DEFAULTS = SamplingParams()
_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
# name -> (lowest, highest, whether the lowest itself is excluded); None is "no bound"
_BOUNDS: dict[str, tuple[float | None, float | None, bool]] = {
    "max_new_tokens": (0, _INT64[1], False),
    "min_new_tokens": (0, _INT64[1], False),
    "temperature": (0.0, None, False),
    "top_p": (0.0, 1.0, True),
    "top_k": (-1, _INT64[1], False),
    "min_p": (0.0, 1.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 2.0, False),
    "n": (1, MAX_PARALLEL_SAMPLES, False),
    "stream_interval": (1, _INT64[1], False),
    "sampling_seed": (*_INT64, False),
}
_NULLABLE = ("max_new_tokens", "stream_interval", "sampling_seed")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def _check_bounds(
    name: str, value: Any, low: float | None, high: float | None, open_low: bool
) -> None:
    if value is None and name in _NULLABLE:
        return
    number = _read_float(name, value) if name in _FLOATS else _read_int(name, value)
    if not isinstance(number, int) and not math.isfinite(number):
        raise InvalidRequest(f"{name} must be a finite number, got {number}", name)
    too_low = low is not None and (number <= low if open_low else number < low)
    if too_low or (high is not None and number > high):
        left = "(" if open_low else "["
        right = "inf)" if high is None else f"{high}]"
        raise InvalidRequest(f"{name} must be in {left}{low}, {right}, got {number}", name)


def _check_token(name: str, token: Any, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise InvalidRequest(
            f"{name} holds {token!r}, which is not a token id in [0, {vocab_size})", name
        )


def _read_int(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON writers of some languages have floats only
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r:.80}", name)
    return value


def _read_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r:.80}", name)
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(f"{name} is too large for a number", name) from None


def _read_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.80}", name)
    return value


def _read_str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {value!r:.80}", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds a lone surrogate, not text", name) from None
    return value


def _read_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} must be a string or a list of strings", name)
    return tuple(_read_str(name, item) for item in value)


def _read_ints(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequest(f"{name} must be a list of integers", name)
    return tuple(_read_int(name, item) for item in value)


def _read_json_text(name: str, value: Any) -> str:
    if isinstance(value, dict | bool):  # true and false are JSON schemas as well
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} cannot be written as JSON: {error}", name) from None
    return _read_str(name, value)


def _read_logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must map token ids to numbers", name)
    pairs = {}
    for key, bias in value.items():
        try:
            token = int(key) if isinstance(key, str) else _read_int(name, key)
        except ValueError:
            raise InvalidRequest(f"{name} has the key {key!r:.80}, not a token id", name) from None
        pairs[token] = _read_float(name, bias)
    return pairs


def _read_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object", name)
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be sent on: {error}", name) from None
    return dict(value)


def _refuse_beam(value: Any) -> None:
    if value is not None and value != 1:
        raise NotSupported("beam search is not built: leave beam_width unset", param="beam_width")


def _refuse_watermark(value: Any) -> None:
    if value:
        raise NotSupported("watermarking is not built: leave watermark unset", param="watermark")


_UNSUPPORTED: dict[str, Callable[[Any], None]] = {
    "beam_width": _refuse_beam,
    "watermark": _refuse_watermark,
}
_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_BOUNDS, _read_int),
    **dict.fromkeys(_FLOATS, _read_float),
    **dict.fromkeys(_FLAGS, _read_bool),
    **dict.fromkeys(("regex", "ebnf"), _read_str),
    **dict.fromkeys(("json_schema", "structural_tag"), _read_json_text),
    **dict.fromkeys(("stop", "stop_regex"), _read_strings),
    "stop_token_ids": _read_ints,
    "logit_bias": _read_logit_bias,
    "custom_params": _read_object,
}
