"""Parsing of texts: /parse_function_call and /separate_reasoning."""

from collections.abc import Callable, Collection
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from radixlm.base.errors import InvalidRequest
from radixlm.base.thread_pool import FairThreadPool
from radixlm.entrypoints.client import run_in
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.off_loop import SMALL_BYTES
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Objects
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tools import registry as tools
from radixlm.text.tools.base import ParsedText, join_deltas, tool_specs

router = APIRouter(tags=["native"])

_OF_MODEL = (None, "", "auto", "response_template")


_TOOL_NAMES: Any = {"examples": [*tools.NAMES]}
_REASONING_NAMES: Any = {"examples": [*reasoning.NAMES]}
MAX_CHUNKS = 4096
MAX_CHARS = 1 << 20
ChunkChars = Annotated[int, Field(ge=1)]
_pool = FairThreadPool("texts to parse", 2, (1,))


class ParseFunctionCall(Body):
    """``tool_call_parser`` unset: that of the model. With ``chunk_chars`` the text is parsed in
    chunks of so many characters, and ``steps`` shows what each of them gave."""

    text: str
    tools: Objects | None = None
    tool_call_parser: str | None = Field(None, json_schema_extra=_TOOL_NAMES)
    chunk_chars: ChunkChars | None = None


class SeparateReasoning(Body):
    """``reasoning_parser`` unset: that of the model. ``chunk_chars``: as of ParseFunctionCall."""

    text: str
    reasoning_parser: str | None = Field(None, json_schema_extra=_REASONING_NAMES)
    return_blocks: bool = False
    chunk_chars: ChunkChars | None = None


def _chunks(text: str, size: int | None) -> list[str]:
    """The text in chunks of ``size`` characters, or whole. InvalidRequest for too many."""
    size = size or max(1, len(text))
    if len(text) > size * MAX_CHUNKS:
        least = -(-len(text) // MAX_CHUNKS)
        message = f"chunk_chars: at most {MAX_CHUNKS} chunks are parsed: {least} works"
        raise InvalidRequest(message, "chunk_chars")
    return [text[start : start + size] for start in range(0, len(text), size)]


def _known(field: str, asked: str | None, of_model: str | None, names: Collection[str]) -> str:
    """The parser that ``field`` asks for, or the model's. InvalidRequest for one that is none."""
    name = of_model if asked in _OF_MODEL else asked
    if name is None or name not in names:
        raise InvalidRequest(f"{field} {name!r:.80} is none of {', '.join(names)}", field)
    return name


@router.post("/parse_function_call", openapi_extra=documented(ParseFunctionCall))
async def parse_function_call(request: Request) -> Response:
    """The tool calls in a text, and the remaining text."""
    body = await read_body(request, ParseFunctionCall, any_type=True)
    asked, of_model = body.tool_call_parser, state_of(request).tool_format
    name = _known("tool_call_parser", asked, of_model, tools.NAMES)
    return json_response(await _in_thread(body.text, lambda: _calls(body, name)))


async def _in_thread(text: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``work`` on ``text``, in a thread unless it is short. InvalidRequest for a text too long."""
    if len(text) > MAX_CHARS:
        message = f"text has {len(text)} characters, at most {MAX_CHARS} are parsed"
        raise InvalidRequest(message, "text")
    return await run_in(_pool, work) if len(text) > SMALL_BYTES else work()


def _calls(body: ParseFunctionCall, name: str) -> dict[str, Any]:
    """The answer by the parser ``name``."""
    parser = tools.create(name, tool_specs(body.tools or []))
    chunks = _chunks(body.text, body.chunk_chars)
    parts = [*map(parser.feed, chunks), parser.finish()]
    calls = join_deltas(delta for part in parts for delta in part.calls)
    shown = [{"tool_index": c.index, "name": c.name, "parameters": c.arguments} for c in calls]
    answer: dict[str, Any] = {"normal_text": "".join(part.text for part in parts), "calls": shown}
    if body.chunk_chars is not None:
        pairs = zip([*chunks, ""], parts, strict=True)
        steps = [{"chunk": chunk} | _shown(part) for chunk, part in pairs]
        answer |= {"steps": steps, "tool_call_parser": name}
    return answer


def _shown(part: ParsedText) -> dict[str, Any]:
    calls = [{"tool_index": d.index, "name": d.name, "parameters": d.arguments} for d in part.calls]
    return {"normal_text": part.text, "calls": calls}


@router.post("/separate_reasoning", openapi_extra=documented(SeparateReasoning))
async def separate_reasoning(request: Request) -> Response:
    """The reasoning in a text, and the remaining text."""
    body = await read_body(request, SeparateReasoning, any_type=True)
    asked, of_model = (body.reasoning_parser or "").lower(), state_of(request).reasoning_format
    name = _known("reasoning_parser", asked, of_model, reasoning.NAMES)
    return json_response(await _in_thread(body.text, lambda: _parts(body, name)))


def _parts(body: SeparateReasoning, name: str) -> dict[str, Any]:
    """The answer by the parser ``name``."""
    parser, chunks = reasoning.create(name), _chunks(body.text, body.chunk_chars)
    parts = [*map(parser.feed, chunks), parser.finish()]
    reasoning_text, text = ("".join(column) for column in zip(*parts, strict=True))
    answer: dict[str, Any] = {"reasoning_text": reasoning_text, "text": text}
    if body.chunk_chars is not None:
        pairs = zip([*chunks, ""], parts, strict=True)
        steps = [{"chunk": c, "reasoning_text": r, "text": t} for c, (r, t) in pairs]
        answer |= {"steps": steps, "reasoning_parser": name}
    if body.return_blocks:
        blocks = [{"type": "reasoning", "text": reasoning_text}, {"type": "text", "text": text}]
        answer["blocks"] = [block for block in blocks if block["text"]]
    return answer
