"""Grammars without a generation: /grammar/check and /grammar/trace.

Both compile as the engine does (first in a process that can be killed), in threads of this process.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest, PromptTooLong
from radixlm.base.lazy import load
from radixlm.base.thread_pool import FairThreadPool
from radixlm.entrypoints.client import current_client, run_in
from radixlm.entrypoints.http.errors import json_answer, json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.entrypoints.http.tokenization import encode
from radixlm.entrypoints.http.transport import cancel_on_disconnect, read_body
from radixlm.entrypoints.request_model import Body, Ints

if TYPE_CHECKING:
    from radixlm.grammar.compile import GrammarCache
    from radixlm.grammar.spec import CompiledGrammar, GrammarSpec, Matcher

router = APIRouter(tags=["native"])

MAX_TOKENS = 8192
TRACE_LIMIT_S = 5.0
_WAIT_S = 60.0  # more than the queue and the compiler together
_pool = FairThreadPool("grammars", 2, (1,))
_making = threading.Lock()
# where the libraries tell the place of an error: JSON, Lark, EBNF; and the caret under a regex
_LINE_COLUMN = re.compile(r"line (\d+) column (\d+)|(?:^|[ :])(\d+)\((\d+)\): |at line (\d+)")
_CARET = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^")


class GrammarCheck(Body):
    """``value``: the grammar's text; a schema or a structural tag may be an object. ``strict``: a
    keyword of the schema that cannot be enforced is an error, else a warning."""

    type: Literal["json_schema", "regex", "ebnf", "lark", "structural_tag"]
    value: str | dict[str, Any]
    strict: bool = False


class GrammarTrace(GrammarCheck):
    """``token_ids``: an output, or its ``text``."""

    token_ids: Annotated[Ints, Field(max_length=MAX_TOKENS)] | None = None
    text: str | None = None


class _Grammars:
    """The compiled grammars of these routes."""

    def __init__(self, state: ServerState) -> None:
        grammar, tokenizer = state.config.grammar, state.require_tokenizer()
        options = load("radixlm.grammar.spec:GrammarOptions")(
            whitespace_pattern=grammar.constrained_json_whitespace_pattern,
            disable_any_whitespace=grammar.constrained_json_disable_any_whitespace,
            max_whitespace=grammar.constrained_json_max_whitespace_cnt,
        )
        name, facts = grammar.grammar_backend, state.intake.facts
        create = load("radixlm.grammar.compile:create_backend")
        backend = create(name, tokenizer, facts.eos_ids, facts.vocab, options)
        make_trial = load("radixlm.grammar.compile:trial_maker")(name, tokenizer, options)
        make_cache = load("radixlm.grammar.compile:GrammarCache")
        self.cache: GrammarCache = make_cache(backend, 32, 1, make_trial=make_trial)

    def compiled(self, spec: GrammarSpec, client: str) -> CompiledGrammar:
        """The grammar; waits for it. InvalidRequest or Overloaded where there is none."""
        future = self.cache.request(spec, client)
        future.wait(_WAIT_S)
        return future.grammar()


def _check_can(state: ServerState) -> None:
    if state.config.grammar.grammar_backend == "none":
        raise InvalidRequest("grammars are off: start without --grammar-backend none", "type")
    state.require_tokenizer()


def _grammars(state: ServerState) -> _Grammars:
    """Call in a thread: the first call may import a library of seconds."""
    with _making:
        made = state.extras.get(_Grammars)
        if made is None:
            made = state.extras[_Grammars] = _Grammars(state)
    grammars: _Grammars = made
    return grammars


def _compiled(state: ServerState, spec: GrammarSpec, client: str) -> CompiledGrammar:
    return _grammars(state).compiled(spec, client)


def close_grammars(state: ServerState) -> None:
    """End the threads and processes that compile for these routes."""
    made = state.extras.pop(_Grammars, None)
    if made is not None:
        made.cache.close()


def _spec(body: GrammarCheck) -> GrammarSpec:
    is_json = body.type in ("json_schema", "structural_tag")
    value = body.value
    if not isinstance(value, str) and not is_json:
        raise InvalidRequest(f"value: the text of the {body.type}, not an object", "value")
    text = value if isinstance(value, str) else json.dumps(value)
    spec: GrammarSpec = load("radixlm.grammar.spec:GrammarSpec")(body.type, text, body.strict)
    return spec


@router.post("/grammar/check", openapi_extra=documented(GrammarCheck))
async def check(request: Request) -> Response:
    """Whether a grammar can be used, else why not and where."""
    body = await read_body(request, GrammarCheck, any_type=True)
    state, spec = state_of(request), _spec(body)
    _check_can(state)
    try:
        work = run_in(_pool, _compiled, state, spec, current_client())
        compiled = await cancel_on_disconnect(request, work)
    except InvalidRequest as error:
        message = error.message.replace("<non-verbose/>", "")
        answer = {"ok": False, "message": message, "position": position(message, spec.text)}
        return json_response(answer | {"warnings": []})
    answer = {"ok": True, "message": None, "position": None, "warnings": [*compiled.warnings]}
    return json_response(answer)


def position(message: str, text: str) -> dict[str, int] | None:
    """Line and column (from 1) of the place in ``text`` that a library's message names."""
    caret = _CARET.search(message)
    if caret is not None:  # the message's other numbers are of what the regex was put into
        start = text.find(caret[1])
        return {"line": 1, "column": start + len(caret[2]) + 1} if start >= 0 else None
    found = _LINE_COLUMN.search(message)
    if found is None:
        return None
    line, column = found[1] or found[3] or found[5], found[2] or found[4] or 1
    return {"line": int(line), "column": int(column)}


@router.post("/grammar/trace", openapi_extra=documented(GrammarTrace))
async def trace(request: Request) -> Response:
    """What a grammar allowed at each token of an output: the number of allowed tokens, and whether
    the token was forced. Ends before the first token that is not allowed."""
    body = await read_body(request, GrammarTrace, any_type=True)
    state = state_of(request)
    _check_can(state)
    spec = _spec(body)
    if (body.token_ids is None) == (body.text is None):
        raise InvalidRequest("exactly one of token_ids and text must be given", "token_ids")
    ids = body.token_ids
    if ids is None:
        ids = await encode(state, body.text or "", "text", add_special_tokens=False)
    if len(ids) > MAX_TOKENS:
        raise PromptTooLong(f"text: {len(ids)} tokens, a trace has at most {MAX_TOKENS}", "text")

    def work() -> dict[str, Any]:
        matcher = _compiled(state, spec, client).matcher()
        return traced(matcher, ids, facts.vocab, facts.eos_ids)

    client, facts = current_client(), state.intake.facts
    got = await cancel_on_disconnect(request, run_in(_pool, work))
    return await json_answer(got | {"token_ids": ids, "vocab_size": facts.vocab})


def traced(
    matcher: Matcher, ids: list[int], vocab: int, eos_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Walk ``ids`` through the grammar. ``allowed`` and ``forced`` have an entry for each accepted
    token, and one more for the first that is not allowed; ``is_complete``: all are accepted, and
    one of ``eos_ids`` may follow. InvalidRequest after TRACE_LIMIT_S."""
    mask = np.zeros(-(-vocab // 32), np.int32)
    allowed: list[int] = []
    forced: list[bool] = []
    coming: list[int] = []  # tokens that the grammar forces next
    num_accepted, end_s = 0, time.monotonic() + TRACE_LIMIT_S
    for token in ids:
        if time.monotonic() > end_s:
            message = f"the grammar took {TRACE_LIMIT_S:g} s for {num_accepted} tokens: send fewer"
            raise InvalidRequest(message, "token_ids")
        coming = coming or matcher.forced_tokens()
        matcher.fill_mask(mask)
        allowed.append(int(np.bitwise_count(mask.view(np.uint32)).sum()))
        forced.append(bool(coming) and coming[0] == token)
        if not matcher.accept(token):
            break
        num_accepted += 1
        coming = coming[1:] if forced[-1] else []
    can_end = matcher.is_terminated or any(matcher.copy().accept(end) for end in eos_ids)
    shown = {"allowed": allowed, "forced": forced, "num_accepted": num_accepted}
    return shown | {"is_complete": can_end and num_accepted == len(ids)}
