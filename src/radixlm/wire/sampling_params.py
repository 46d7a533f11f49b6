"""SamplingParams: what a client asks of the sampler, the stop rules and the grammar of one request.

``from_dict`` reads a JSON object, ``validate`` checks every bound; both raise InvalidRequest naming
the field.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Self, get_args

import msgspec
from msgspec import Meta

from radixlm.base.errors import InvalidRequest, NotSupported
from radixlm.wire.fields import (
    FIELDS,
    Field,
    api_names,
    check_unsupported,
    fields_of,
    renames,
)
from radixlm.wire.foreign import sampling_of_foreign
from radixlm.wire.unknown import note_unknown

MAX_PARALLEL_SAMPLES = 1024
MAX_STOPS = 1024
MAX_STOP_IDS = 1 << 18  # more than the vocabularies of most models
MAX_STOP_CHARS = 16384  # of all items together: a matcher is built of them
MAX_GRAMMAR_CHARS = 4 << 20
MIN_INT, MAX_INT = -(1 << 63), (1 << 63) - 1
GREEDY_BELOW = 1e-6  # a temperature below this is greedy: dividing by it would overflow
ANY_JSON_OBJECT = "$$ANY$$"

# APIs that have most parameters under the same name (``wire/fields.py``)
COMMON = "openai responses ollama_options speech"
EVERY = f"{COMMON} messages checkpoint"


def param(apis: str, **bounds: Any) -> Meta:
    """The bounds of a parameter, and the APIs that have it besides ``sampling_params``. A string
    with the title "JSON" may also be sent as a JSON object."""
    return Meta(extra={"apis": f"sampling_params {apis}"}, **bounds)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a client may set. ``max_new_tokens`` None means "until the context is full".

    A line here is all that the APIs need for a new parameter: type, APIs, bounds and default.
    """

    max_new_tokens: (
        Annotated[
            int,
            param(
                "completions:max_tokens chat:max_completion_tokens responses:max_output_tokens "
                "messages:max_tokens ollama_options:num_predict speech:max_completion_tokens",
                ge=0,
                le=MAX_INT,
            ),
        ]
        | None
    ) = 128
    stop: Annotated[
        tuple[str, ...], param("openai responses messages:stop_sequences ollama_options")
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], param("openai responses")] = ()
    stop_regex: Annotated[tuple[str, ...], param("openai")] = ()
    temperature: Annotated[float, param(EVERY, ge=0)] = 1.0
    top_p: Annotated[float, param(EVERY, gt=0, le=1)] = 1.0
    top_k: Annotated[int, param(EVERY, ge=-1, le=MAX_INT)] = -1
    min_p: Annotated[float, param(f"{COMMON} checkpoint", ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, param(COMMON, ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, param(COMMON, ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[
        float, param(f"{COMMON} ollama_options:repeat_penalty checkpoint", ge=0, le=2)
    ] = 1.0
    min_new_tokens: Annotated[
        int, param("openai:min_tokens responses:min_tokens", ge=0, le=MAX_INT)
    ] = 0
    n: Annotated[int, param("openai", ge=1, le=MAX_PARALLEL_SAMPLES)] = 1
    best_of: Annotated[int, param("completions", ge=1, le=MAX_PARALLEL_SAMPLES)] | None = None
    # beam search: ``n`` of the sequences that it keeps; SGLang's and, in OpenAI's routes, vLLM's
    beam_width: Annotated[int, param("", ge=1, le=MAX_PARALLEL_SAMPLES)] | None = None
    length_penalty: Annotated[float, param("openai", ge=-10, le=10)] = 1.0
    json_schema: Annotated[str, param("openai responses", title="JSON")] | None = None
    regex: Annotated[str, param("openai responses")] | None = None
    ebnf: Annotated[str, param("openai responses")] | None = None
    structural_tag: Annotated[str, param("openai responses", title="JSON")] | None = None
    ignore_eos: Annotated[bool, param("openai responses")] = False
    skip_special_tokens: Annotated[bool, param("openai responses")] = True
    spaces_between_special_tokens: Annotated[bool, param("openai")] = True
    no_stop_trim: Annotated[bool, param("openai responses")] = False
    stream_interval: Annotated[int, param("openai", ge=1, le=MAX_INT)] | None = None
    logit_bias: Annotated[dict[int, float], param("openai responses")] | None = None
    allowed_token_ids: Annotated[tuple[int, ...], param("openai")] = ()
    bad_words: Annotated[tuple[str, ...], param("openai")] = ()
    custom_params: Annotated[dict[str, Any], param("openai")] | None = None
    sampling_seed: (
        Annotated[
            int,
            param(
                "openai:seed responses:seed ollama_options:seed speech:seed", ge=MIN_INT, le=MAX_INT
            ),
        ]
        | None
    ) = None

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], base: Self | None = None) -> Self:
        """Read a JSON object over ``base`` (the defaults). A null keeps the default.

        Accepts the shapes clients send: one string or a list for the stops, string keys in
        logit_bias, an object instead of a JSON string for json_schema and structural_tag.
        """
        values: dict[str, Any] = {}
        foreign: dict[str, Any] = {}
        for name, value in mapping.items():
            read = _READERS.get(name)
            if read is not None:
                values |= {} if value is None else {name: read(name, value)}
                continue
            check_unsupported(_UNSUPPORTED, {name: value}, NotSupported)
            if name in _UNSUPPORTED:
                continue
            meant = sampling_of_foreign(name, value)
            if meant is None:
                note_unknown(name, "sampling parameter")
                continue
            try:
                foreign |= {target: _READERS[target](target, one) for target, one in meant.items()}
            except InvalidRequest as error:
                message = error.message.replace(str(error.param), name, 1)
                raise InvalidRequest(message, name) from None
        values = foreign | values
        return msgspec.structs.replace(base or cls(), **values)

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
        for name, read, bounds in _CHECKS:
            value = getattr(self, name)
            if value is not None:
                _check_bounds(name, read(name, value), bounds)
        if self.top_k == 0:
            raise InvalidRequest("top_k must be -1 or at least 1, got 0", "top_k")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed "
                f"max_new_tokens ({self.max_new_tokens})",
                "min_new_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of ({self.best_of}) must not be less than n ({self.n})", "best_of"
            )
        for token in self.allowed_token_ids:
            _check_token("allowed_token_ids", token, vocab_size)
        self._check_stops()
        self._check_logit_bias(vocab_size)
        self._check_grammars()

    def _check_stops(self) -> None:
        for name in ("stop", "stop_regex", "bad_words"):
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
        num_ids = len(self.stop_token_ids)
        if num_ids > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {num_ids} items, at most {MAX_STOP_IDS}", "stop_token_ids"
            )
        for token in self.stop_token_ids:  # an id that the model does not have matches nothing
            _read_int("stop_token_ids", token)

    def _check_logit_bias(self, vocab_size: int) -> None:
        for token, bias in (self.logit_bias or {}).items():
            _check_token("logit_bias", token, vocab_size)
            if not math.isfinite(_read_float("logit_bias", bias)):
                raise InvalidRequest(f"logit_bias of token {token} must be finite", "logit_bias")

    def _check_grammars(self) -> None:
        names = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            message = "Only one of regex, json_schema, or ebnf can be set."
            if "structural_tag" in names:
                message = f"Only one of {' and '.join(names)} can be set."
            raise InvalidRequest(message, names[-1])
        for name in names:
            text = _read_str(name, getattr(self, name))
            if len(text) > MAX_GRAMMAR_CHARS:
                raise InvalidRequest(
                    f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS}", name
                )


@cache
def parameter_names(source: str, target: str) -> Mapping[str, str]:
    """Names of parameters in one API -> their names in another, for those that both have."""
    return renames(source, target, SAMPLING_FIELDS)


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


def _check_bounds(name: str, number: float, bounds: Meta) -> None:
    if not isinstance(number, int) and not math.isfinite(number):
        raise InvalidRequest(f"{name} must be a finite number, got {number}", name)
    low = bounds.ge if bounds.gt is None else bounds.gt
    if low is None:
        return  # a bool
    is_low = number < low or number == bounds.gt
    if is_low or (bounds.le is not None and number > bounds.le):
        left = "[" if bounds.gt is None else "("
        right = "inf)" if bounds.le is None else f"{bounds.le}]"
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


def _lax(kind: Any) -> Callable[[str, Any], Any]:
    """The reader of a kind; numbers may be strings, and booleans strings, 0 or 1."""
    read = _READS[kind]
    if kind not in (int, float, bool):
        return read

    def read_lax(name: str, value: Any) -> Any:
        if isinstance(value, str) or (kind is bool and isinstance(value, int)):
            try:
                value = msgspec.convert(value, kind, strict=False)
            except msgspec.ValidationError:
                pass  # ``read`` says what is wrong
        return read(name, value)

    return read_lax


def _field(name: str, default: Any) -> Field:
    type_ = SamplingParams.__annotations__[name]
    if not hasattr(type_, "__metadata__"):  # Annotated[...] | None
        type_ = next(one for one in get_args(type_) if one is not NoneType)
    return Field(name, type_, api_names(name, type_.__metadata__[0].extra["apis"]), default=default)


SAMPLING_FIELDS: tuple[Field, ...] = tuple(
    _field(name, getattr(SamplingParams(), name)) for name in SamplingParams.__struct_fields__
)
_READS: dict[Any, Callable[[str, Any], Any]] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    str: _read_str,
    tuple[str, ...]: _read_strings,
    tuple[int, ...]: _read_ints,
    dict[int, float]: _read_logit_bias,
    dict[str, Any]: _read_object,
}
_READERS = {
    field.name: _read_json_text if field.is_json else _lax(field.kind) for field in SAMPLING_FIELDS
}
_CHECKS = [
    (field.name, _READS[field.kind], field.bounds)
    for field in SAMPLING_FIELDS
    if field.bounds is not None and field.kind in (int, float, bool)
]
_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
_UNSUPPORTED = fields_of("sampling_params", FIELDS)
