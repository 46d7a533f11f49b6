"""Errors of grammars name the field that the client has sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.http_server import ScriptedServer

from radixlm.wire.replies import Finish

_RING = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _RING}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [_TOOL], "tool_choice": "required"}, "tools"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": _RING},
                }
            },
            "response_format",
        ),
        ({"regex": "["}, "regex"),
    ],
)
async def test_a_bad_grammar_is_named_as_it_was_sent(
    server: ScriptedServer, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine knows only kinds of grammars."""

    async def refuse(request: Any) -> Any:
        kind = {"lark": "ebnf"}.get(request.grammar.kind, request.grammar.kind)
        finish = Finish("error", message=f"invalid {kind}: no text fits it", status=400)
        return [SimpleNamespace(finish=finish, completion_tokens=0)]

    monkeypatch.setattr(server.engine.intake, "collect", refuse)
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    error = (await server.post("/v1/chat/completions", **body)).json()["error"]
    assert (error["param"], error["message"]) == (param, f"invalid {param}: no text fits it")
