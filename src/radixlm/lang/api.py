"""The names of the frontend language: ``import radixlm as sgl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, overload

from radixlm.base.lazy import load
from radixlm.lang.choices import ChoicesSamplingMethod, token_length_normalized
from radixlm.lang.function import SglFunction
from radixlm.lang.global_config import backend_of, global_config
from radixlm.lang.ir import (
    SglExpr,
    SglExprList,
    SglGen,
    SglImage,
    SglRoleBegin,
    SglRoleEnd,
    SglSamplingParams,
    SglSelect,
    SglSeparateReasoning,
    SglTemplate,
    SglToolLoop,
    SglVideo,
    parts,
)

ALL_FRAMES = -1


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
def function(func: Any = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is ``s``; a decorator, with or without
    arguments. ``num_api_spec_tokens``: have a completion model write so many tokens ahead, and cut
    later calls out of them; have a chat model answer a turn by one call."""
    if func is not None:
        return SglFunction(func, num_api_spec_tokens)
    return lambda given: SglFunction(given, num_api_spec_tokens)


def set_default_backend(backend: Any) -> None:
    """The backend of programs that name none: an Engine, a Runtime, or any other backend."""
    global_config.default_backend = backend


def flush_cache(backend: Any = None) -> Any:
    """Have the backend forget cached prefixes; False without a backend."""
    if backend is None and global_config.default_backend is None:
        return False
    return backend_of(backend).flush_cache()


def get_server_info(backend: Any = None) -> Any:
    """What the backend's server tells of itself; None without a backend."""
    if backend is None and global_config.default_backend is None:
        return None
    return backend_of(backend).get_server_info()


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | None = None,
    *,
    type: Any = None,
    ebnf: str | None = None,
    structural_tag: str | None = None,
    stop_regex: str | Sequence[str] | None = None,
    seed: int | None = None,
) -> SglGen | SglSelect:
    """Generate text, the value of the variable ``name``. Parameters that are None are those of
    ``run``. ``dtype`` int, float, str or bool constrains the text, ``choices`` selects one,
    ``type`` gives a parsed value of a type. ``seed`` of what is drawn at a temperature."""
    if choices:
        method = token_length_normalized if choices_method is None else choices_method
        return SglSelect(name, choices, temperature or 0.0, method)
    fields: dict[str, Any] = {"regex": regex, "json_schema": json_schema}
    parse = None
    if type is not None:
        found, parse = load("radixlm.lang.typed:constraint")(type)
        fields |= found
    params = SglSamplingParams(
        max_tokens, min_tokens, n, stop, stop_token_ids, temperature, top_p, top_k, min_p,
        frequency_penalty, presence_penalty, ignore_eos, return_logprob, logprob_start_len,
        top_logprobs_num, return_text_in_logprobs, dtype=dtype, **fields, ebnf=ebnf,
        structural_tag=structural_tag, stop_regex=stop_regex, seed=seed,
    )  # fmt: skip
    return SglGen(name, params, parse)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> SglGen:
    """``gen`` with dtype int, without min_tokens, choices, regex and json_schema."""
    return cast(SglGen, gen(name, max_tokens, None, n, *args, dtype=int, **kwargs))  # type: ignore[misc]


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> SglGen:
    """``gen`` with dtype str, without min_tokens, choices, regex and json_schema."""
    return cast(SglGen, gen(name, max_tokens, None, n, *args, dtype=str, **kwargs))  # type: ignore[misc]


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
) -> SglSelect:
    """Append the one of ``choices`` that the model finds likeliest; with a ``temperature`` one
    drawn by their scores."""
    assert choices is not None, "select needs choices: select('answer', choices=['yes', 'no'])"
    return SglSelect(name, choices, temperature, choices_method)


def tool_loop(
    name: str | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    max_rounds: int = 5,
    parser: str | None = None,
    **sampling: Any,
) -> SglToolLoop:
    """An answer to the messages so far, for which the model may call Python functions. Their type
    hints and docstrings tell the model what they take; those of one round run side by side. After
    ``max_rounds`` rounds no tools are offered. ``parser``: the form of calls, None for that of the
    model's chat template; ``sampling``: max_tokens, temperature ... as of ``gen``."""
    assert tools and max_rounds > 0, "tool_loop needs tools: tool_loop('answer', tools=[search])"
    made = gen(None, **sampling)
    assert isinstance(made, SglGen), "tool_loop takes no choices"
    return SglToolLoop(name, tools, max_rounds, parser, made.sampling_params)


def template(*pieces: SglExpr | str, max_tokens: int | None = None, **sampling: Any) -> SglTemplate:
    """Fixed texts with holes, generated by one call instead of one a hole: fixed text is forced and
    costs nearly nothing. A hole is a ``gen`` with a regex or a dtype, or a ``select``; its own
    max_tokens count only in the sum, and a choice is generated, not scored."""
    made = SglTemplate([one for piece in pieces for one in parts(piece)])
    call = gen(None, max_tokens or made.max_new_tokens, regex=made.asked, **sampling)
    assert isinstance(call, SglGen)
    made.call = call
    return made


def image(expr: Any) -> SglImage:
    """An image: a file's path, its bytes, or a PIL image."""
    return SglImage(expr)


def video(path: str, num_frames: int = ALL_FRAMES) -> SglVideo:
    """A video's file. ``num_frames`` is not sent: the server's processor chooses the frames."""
    return SglVideo(path, num_frames)


def separate_reasoning(expr: SglExpr, model_type: str) -> SglExprList:
    """``expr``, whose variables then have the answer alone; ``{name}_reasoning_content`` have the
    thinking."""
    return SglExprList([*parts(expr), SglSeparateReasoning(model_type, expr)])


def _message(role: str, expr: SglExpr | str | None) -> SglExprList:
    inner = [] if expr is None else parts(expr)
    return SglExprList([SglRoleBegin(role), *inner, SglRoleEnd(role)])


def system(expr: SglExpr | str | None = None) -> SglExprList:
    """A system message."""
    return _message("system", expr)


def user(expr: SglExpr | str | None = None) -> SglExprList:
    """A user's message."""
    return _message("user", expr)


def assistant(expr: SglExpr | str | None = None) -> SglExprList:
    """An assistant's message."""
    return _message("assistant", expr)


def system_begin() -> SglRoleBegin:
    return SglRoleBegin("system")


def system_end() -> SglRoleEnd:
    return SglRoleEnd("system")


def user_begin() -> SglRoleBegin:
    return SglRoleBegin("user")


def user_end() -> SglRoleEnd:
    return SglRoleEnd("user")


def assistant_begin() -> SglRoleBegin:
    return SglRoleBegin("assistant")


def assistant_end() -> SglRoleEnd:
    return SglRoleEnd("assistant")
