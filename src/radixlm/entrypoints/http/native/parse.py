"""Parsing of texts: /parse_function_call and /separate_reasoning."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.openapi.document import documented
from radixlm.entrypoints.http.state import state_of
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.request_model import Body, Objects
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.reasoning.base import split_all
from radixlm.text.tools import registry as tools
from radixlm.text.tools.base import parse_all, tool_specs

router = APIRouter(tags=["native"])

_OF_MODEL = (None, "", "auto", "response_template")


class ParseFunctionCall(Body):
    """``tool_call_parser`` unset: that of the model."""

    text: str
    tools: Objects | None = None
    tool_call_parser: str | None = None


class SeparateReasoning(Body):
    """``reasoning_parser`` unset: that of the model."""

    text: str
    reasoning_parser: str | None = None
    return_blocks: bool = False


@router.post("/parse_function_call", openapi_extra=documented(ParseFunctionCall))
async def parse_function_call(request: Request) -> Response:
    """The tool calls in a text, and the remaining text."""
    body = await read_body(request, ParseFunctionCall, any_type=True)
    name = body.tool_call_parser
    if name in _OF_MODEL:
        name = state_of(request).tool_format
    if name not in tools.NAMES:
        raise InvalidRequest(
            f"tool_call_parser {name!r:.80} is none of {', '.join(tools.NAMES)}",
            "tool_call_parser",
        )
    text, calls = parse_all(tools.create(name, tool_specs(body.tools or [])), body.text)
    shown = [{"tool_index": c.index, "name": c.name, "parameters": c.arguments} for c in calls]
    return json_response({"normal_text": text, "calls": shown})


@router.post("/separate_reasoning", openapi_extra=documented(SeparateReasoning))
async def separate_reasoning(request: Request) -> Response:
    """The reasoning in a text, and the remaining text."""
    body = await read_body(request, SeparateReasoning, any_type=True)
    name = body.reasoning_parser
    if name in _OF_MODEL:
        name = state_of(request).reasoning_format
    if name not in reasoning.NAMES:
        raise InvalidRequest(
            f"reasoning_parser {name!r:.80} is none of {', '.join(reasoning.NAMES)}",
            "reasoning_parser",
        )
    reasoning_text, text = split_all(reasoning.create(name), body.text)
    answer: dict[str, object] = {"reasoning_text": reasoning_text, "text": text}
    if body.return_blocks:
        blocks = [{"type": "reasoning", "text": reasoning_text}, {"type": "text", "text": text}]
        answer["blocks"] = [block for block in blocks if block["text"]]
    return json_response(answer)
