"""/grammar/check and /grammar/trace, against a finite language that is written out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.http_server import ScriptedServer, scripted_server

from radixlm.entrypoints.http.native.grammar import MAX_TOKENS, close_grammars, position


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(tmp_path_factory.mktemp("toy"), {}) as made:
        yield made
        close_grammars(made.state)


pytestmark = pytest.mark.asyncio(loop_scope="module")
# (kind, value, whether it is fine, line and column of the mistake)
CASES = [
    ("regex", "(yes|no)[0-9]{2}", True, None),
    ("regex", "ab(", False, (1, 3)),
    ("ebnf", 'root ::= "a" | "b"', True, None),
    ("ebnf", 'root ::= "a"\nb ::= ("a"', False, (2, 1)),
    ("lark", "start: /a/ b\nb: /c/", True, None),
    ("lark", "start: /a/\n\nb: (\n", False, (3, 5)),
    ("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}}, True, None),
    ("json_schema", '{"type":\n nope}', False, (2, 2)),
    ("json_schema", '{"type": "foo"}', False, None),
    ("structural_tag", {}, False, None),
]


@pytest.mark.parametrize(("kind", "value", "is_fine", "place"), CASES)
async def test_a_check_names_the_place(
    server: ScriptedServer, kind: str, value: object, is_fine: bool, place: tuple[int, int] | None
) -> None:
    got = (await server.post("/grammar/check", type=kind, value=value)).json()
    assert got["ok"] is is_fine and (got["message"] is None) is is_fine, got
    expected = place and {"line": place[0], "column": place[1]}
    assert got["position"] == expected, got


async def test_what_is_not_enforced_is_a_warning_or_refused(server: ScriptedServer) -> None:
    schema = {"type": "array", "uniqueItems": True}
    got = (await server.post("/grammar/check", type="json_schema", value=schema)).json()
    assert got["ok"] and "uniqueItems" in got["warnings"][0]
    strict = await server.post("/grammar/check", type="json_schema", value=schema, strict=True)
    assert strict.json()["ok"] is False and "uniqueItems" in strict.json()["message"]


async def test_a_trace_counts_what_the_language_allows(server: ScriptedServer) -> None:
    words = [f"{a}{n}" for a in ("yes", "no") for n in range(10, 100)]
    pieces = [server.tokenizer.token_bytes(i).decode("latin-1") for i in range(512)]
    text, body = "yes42", {"type": "regex", "value": "(yes|no)[1-9][0-9]"}
    got = (await server.post("/grammar/trace", **body, text=text)).json()
    prefix, vocab = "", got["vocab_size"]
    assert vocab == server.tokenizer.vocab_size
    for token, allowed, forced in zip(got["token_ids"], got["allowed"], got["forced"], strict=True):
        longer = {w[len(prefix) :] for w in words if w.startswith(prefix)}
        fitting = [
            i
            for i in range(min(vocab, 512))
            if not server.tokenizer.is_special(i)
            and pieces[i]
            and any(rest.startswith(pieces[i]) for rest in longer)
        ]
        is_forced = len({rest[0] for rest in longer}) == 1
        assert forced is is_forced, (prefix, token)
        assert allowed == (1 if is_forced else len(fitting)), (prefix, allowed, fitting)
        prefix += server.tokenizer.decode([token])
    assert prefix == text and got["num_accepted"] == len(got["token_ids"]) and got["is_complete"]


async def test_a_trace_ends_at_what_is_not_allowed(server: ScriptedServer) -> None:
    body = {"type": "lark", "value": "start: /[a-c]+/"}
    ids = server.tokenizer.encode("ab", False) + server.tokenizer.encode("z", False)
    got = (await server.post("/grammar/trace", **body, token_ids=ids)).json()
    assert got["num_accepted"] == len(ids) - 1 and len(got["allowed"]) == len(ids)
    assert not got["is_complete"]
    for bad in ({}, {"text": "a", "token_ids": [1]}, {"token_ids": [1] * (MAX_TOKENS + 1)}):
        assert (await server.post("/grammar/trace", **body, **bad)).status_code == 400
    refused = await server.post("/grammar/trace", type="regex", value="(", text="a")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "regex"
    object_ = await server.post("/grammar/check", type="regex", value={})
    assert object_.status_code == 400 and object_.json()["error"]["param"] == "value"


async def test_without_a_backend(toy_folder: Path) -> None:
    async with scripted_server(toy_folder, {}, grammar_backend="none") as off:
        got = await off.post("/grammar/check", type="regex", value="a")
        assert got.status_code == 400 and "--grammar-backend" in got.text


async def test_positions_of_messages() -> None:
    assert position("nothing to see", "x") is None
    assert position("invalid ebnf: 12(7): Expected", "") == {"line": 12, "column": 7}
