"""Streams of workers without a journal: greedy text goes on from the prompt and the text so far."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from radixlm.router.call import Call
from radixlm.router.foreign import ForeignText, can_go_on
from radixlm.router.journal import Journal, JournalMemory
from radixlm.router.worker import Worker
from tests.router.client import ask
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.mock_answers import foreign_blocks
from tests.router.mock_worker import MockWorker

MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "temperature": 0, **USAGE},
    "/v1/completions": {"prompt": "p", "temperature": 0.0, **USAGE},
    "/generate": {"text": "p", "sampling_params": {"temperature": 0}},
}
LIMIT = {"/v1/chat/completions": 12, "/v1/completions": 14, "/generate": 13}


def body(route: str, limit: int | None = None, **fields: Any) -> dict[str, Any]:
    made = BODIES[route] | {"stream": True, "model": "mock"} | fields
    if limit and route == "/generate":
        return made | {"sampling_params": made["sampling_params"] | {"max_new_tokens": limit}}
    return made | ({"max_tokens": limit} if limit else {})


def text_of(route: str, events: list[Any]) -> str:
    """All that a stream says."""
    if route == "/generate":
        return str([event["text"] for event in events if "text" in event][-1])
    choices = [choice for event in events if "id" in event for choice in event["choices"]]
    return "".join(one["text"] if "text" in one else one["delta"]["content"] for one in choices)


def front_of(workers: list[MockWorker], **options: Any) -> Front:
    """A gateway whose workers are foreign."""
    front = Front(workers, **options)
    for worker in front.workers:
        worker.facts = {"models": ["mock"]}
    return front


def cut(worker: MockWorker, after: int) -> None:
    """Cut the next answer after so many bytes."""
    worker.faults.cut_after, worker.faults.cut_first = after, 1


@pytest.mark.parametrize("limit", [None, "some"])
@pytest.mark.parametrize("route", BODIES)
async def test_a_stream_outlives_foreign_workers(
    start_workers: StartWorkers, route: str, limit: str | None
) -> None:
    """Each worker is cut once, after each number of bytes: the events are those of one worker."""
    workers = await start_workers(3, is_foreign=True)
    asked = body(route, LIMIT[route] if limit else 20)
    whole = (await ask(workers[0].url, "POST", route, asked)).events
    num_moves = num_failed = 0
    for cut_after in range(650, 2600, 61):
        for worker in workers:
            cut(worker, cut_after)
            worker.seen.clear()
        async with front_of(workers, resume_foreign=True) as front:
            answer = await ask(front.url, "POST", route, asked)
        assert answer.status == 200 and answer.is_complete and front.is_idle
        events, first = answer.events, answer.events[0]
        expected = [_named_as(event, first) for event in whole]
        if any("error" in event for event in events):  # all tokens were sent, only the end was not
            num_failed += 1
            got = [event for event in events[:-1] if "error" not in event]
            assert got == expected[: len(got)]
            assert text_of(route, events) == text_of(route, expected)
        else:
            assert events == expected
            num_moves += sum(len(worker.seen) for worker in workers) - 1
    assert num_moves > 20 and num_failed < 10


def _named_as(event: Any, first: Any) -> Any:
    """``event`` with the id and the time of ``first``."""
    if not isinstance(event, dict):
        return event
    if "meta_info" in event:
        return event | {"meta_info": event["meta_info"] | {"id": first["meta_info"]["id"]}}
    return event | {"id": first["id"], "created": first["created"]}


@pytest.mark.parametrize("route", BODIES)
async def test_what_the_next_worker_is_asked(start_workers: StartWorkers, route: str) -> None:
    workers = await start_workers(2, is_foreign=True)
    cut(workers[0], 900)
    async with front_of(workers, resume_foreign=True) as front:
        answer = await ask(front.url, "POST", route, body(route, 15, user="u"))
    sent, asked = text_of(route, answer.events), orjson.loads(workers[1].seen[0].body)
    assert asked["user"] == "u" and "resume" not in asked
    if route == "/v1/chat/completions":
        said = asked["messages"][-1]["content"]
        assert asked["messages"] == [*MESSAGES, {"role": "assistant", "content": said}]
        assert asked["continue_final_message"] is True
        assert asked["add_generation_prompt"] is False
    else:
        said = asked["text" if route == "/generate" else "prompt"].removeprefix("p")
    left = asked.get("max_tokens") or asked["sampling_params"]["max_new_tokens"]
    assert said and sent.startswith(said)
    assert left == 15 - said.count("t") - said.count("\n\n")


async def test_a_limit_that_the_body_leaves_out_is_the_servers(
    start_workers: StartWorkers,
) -> None:
    workers = await start_workers(2, is_foreign=True)
    lefts = {}
    for route in BODIES:
        cut(workers[0], 900)
        async with front_of(workers, resume_foreign=True) as front:
            await ask(front.url, "POST", route, body(route))
        asked = orjson.loads(workers[1].seen[-1].body)
        lefts[route] = asked.get("max_tokens") or asked.get("sampling_params", {}).get(
            "max_new_tokens"
        )
    assert lefts["/v1/chat/completions"] is None  # the rest of the context
    assert 0 < lefts["/v1/completions"] < 16 and 100 < lefts["/generate"] < 128


REFUSED: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": None},
    {"temperature": False},
    {"response_format": {"type": "json_object"}},
    {"regex": "a+"},
    {"json_schema": "{}"},
    {"ebnf": "root ::= 'a'"},
    {"structural_tag": "{}"},
    {"guided_json": {}, "guided_choice": ["a"]},
    {"structured_outputs": {"regex": "a"}},
    {"tools": [{"type": "function"}]},
    {"logprobs": True},
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"frequency_penalty": 0.1},
    {"presence_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"n": 2},
    {"best_of": 2},
    {"echo": True},
    {"stop": "x"},
    {"stop": ["x"]},
    {"min_tokens": 3},
    {"suffix": "s"},
    {"max_tokens": "9"},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"a_field_of_tomorrow": 1},
]
TAKEN: list[dict[str, Any]] = [
    {},
    {"n": 1, "best_of": 1, "echo": False, "stop": None, "tools": [], "logprobs": None},
    {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0},
    {"response_format": {"type": "text"}, "min_tokens": 0, "max_tokens": None},
    {"seed": 7, "top_p": 0.9, "ignore_eos": True, "logit_bias": {"5": 1}},
]


def call(route: str, **fields: Any) -> Call:
    """Fields of /generate that sample go where they belong."""
    made = body(route)
    if route == "/generate":
        made["sampling_params"] = made["sampling_params"] | fields
    else:
        made |= fields
    return Call("POST", route, "", [], orjson.dumps(made))


@pytest.mark.parametrize("route", BODIES)
def test_only_what_the_text_tells_goes_on(route: str) -> None:
    assert [fields for fields in TAKEN if not can_go_on(call(route, **fields))] == []
    assert [fields for fields in REFUSED if can_go_on(call(route, **fields))] == []


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}),
        ("/generate", {"text": ["a"]}),
        ("/generate", {"input_ids": [1]}),
        ("/generate", {"return_logprob": True}),
        ("/generate", {"sampling_params": [{"temperature": 0}]}),
        ("/generate", {"sampling_params": None}),
        ("/v1/messages", {}),
    ],
)
def test_prompts_that_do_not_go_on(route: str, fields: dict[str, Any]) -> None:
    made = BODIES.get(route, BODIES["/v1/chat/completions"]) | fields
    assert not can_go_on(Call("POST", route, "", [], orjson.dumps(made)))


@pytest.mark.parametrize("route", BODIES)
async def test_else_a_stream_ends_with_an_error(start_workers: StartWorkers, route: str) -> None:
    """With the flag off, at a worker of other weights, and for a grammar."""
    workers = await start_workers(2, is_foreign=True)
    direct = (await ask(workers[0].url, "POST", route, body(route, 20))).body
    cases: list[tuple[bool, dict[str, Any], dict[str, Any]]] = [
        (False, {}, {}),
        (True, {"regex": "a"}, {}),
        (True, {}, {"weight_version": "2"}),
        (True, {}, {"resume_digest": "d"}),
    ]
    for is_on, fields, facts in cases:
        cut(workers[0], 900)
        workers[1].seen.clear()
        async with front_of(workers, resume_foreign=is_on) as front:
            front.workers[1].facts = facts
            answer = await ask(front.url, "POST", route, body(route, 20, **fields))
        assert answer.status == 200 and answer.is_complete and front.is_idle
        kept, _, error = answer.body.partition(b'data: {"error"')
        assert kept and direct.startswith(kept) and b"stream_lost" in error
        assert answer.events[-1] == "[DONE]" and not workers[1].seen


async def test_an_answer_that_is_not_cut_passes_as_it_came(start_workers: StartWorkers) -> None:
    (worker,) = await start_workers(1, is_foreign=True)
    for route in BODIES:
        async with front_of([worker], resume_foreign=True) as front:
            answer = await ask(front.url, "POST", route, body(route, 20))
        assert answer.body == (await ask(worker.url, "POST", route, body(route, 20))).body


def made(route: str, blocks: list[bytes], memory: JournalMemory | None = None) -> Journal:
    """A journal of a foreign stream, after ``blocks``."""
    asked, worker = call(route, max_tokens=100), Worker("http://127.0.0.1:1")
    journal = Journal(asked, worker, memory)
    journal.text = ForeignText(asked, worker)
    for block in blocks:
        assert journal.feed(block) == block
    return journal


def block(**delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": delta.pop("finish_reason", None)}
    return b"data: " + orjson.dumps({"id": "a", "choices": [choice]}) + b"\n\n"


OTHER = Worker("http://127.0.0.1:2")
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "bad",
    [
        block(reasoning_content="hm"),
        block(tool_calls=[{"index": 0}]),
        block(content=["a"]),
        block(content="", finish_reason="stop"),
        block(content="\ufffd"),
        b'data: {"id": "a", "choices": [{"delta": {"content": "a"}}, {}]}\n\n',
        b'data: {"id": "a", "choices": [{"delta": {"content": "a"}, "logprobs": {"a": 1}}]}\n\n',
        b'data: {"error": {}}\n\n',
        b"data: {not JSON\n\n",
    ],
)
def test_events_that_say_more_than_text_are_the_end_of_it(bad: bytes) -> None:
    assert made(CHAT, [block(content="a"), b": ping\n\n"]).can_resume(OTHER)
    assert not made(CHAT, [block(content="a"), bad]).can_resume(OTHER)


def test_pieces_of_generate_do_not_go_on() -> None:
    """SGLang's --stream-output: a text that does not begin with the one before."""
    first, second = (b'data: {"text":"%b","meta_info":{}}\n\n' % one for one in (b"ab", b"cd"))
    assert made("/generate", [first]).can_resume(OTHER)
    assert not made("/generate", [first, second]).can_resume(OTHER)
    assert not made("/generate", [first]).can_resume(_told(stream_output=True))


def _told(**facts: Any) -> Worker:
    worker = Worker("http://127.0.0.1:3")
    worker.facts = facts
    return worker


def test_the_role_is_told_once_and_white_space_is_not_doubled() -> None:
    blocks = [block(role="assistant", content=""), block(content="a"), block(content=" \n")]
    journal = made(CHAT, blocks)
    journal.lost()
    assert journal.text
    asked = orjson.loads(journal.text.body({}))
    assert asked["messages"][-1]["content"] == "a" and asked["max_tokens"] == 99
    assert journal.feed(block(role="assistant", content="")) == b""
    assert journal.feed(block(content=" ")) == b""
    assert journal.feed(block(content="\nb")) == block(content="b")
    assert journal.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def test_a_role_alone_is_asked_again_as_it_was() -> None:
    journal = made(CHAT, [block(role="assistant", content="")])
    journal.lost()
    assert journal.text
    assert orjson.loads(journal.text.body({})) == call(CHAT, max_tokens=100).fields
    assert journal.feed(block(role="assistant", content="")) == b""
    assert journal.feed(block(content="b")) == block(content="b")


def test_tokens_that_are_told_count_and_not_events() -> None:
    """Two tokens an event, as with speculative decoding."""
    route = "/v1/completions"
    event = {"id": "a", "choices": [{"text": "x"}]}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    journal = made(route, [b"data: " + orjson.dumps(event | {"usage": usage}) + b"\n\n"])
    journal.lost()
    assert journal.text and orjson.loads(journal.text.body({}))["max_tokens"] == 98
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    moved = journal.feed(b"data: " + orjson.dumps(event | {"usage": usage}) + b"\n\n")
    told = orjson.loads(moved[6:])["usage"]
    assert told == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}


def test_a_worker_with_other_line_ends() -> None:
    journal = made(CHAT, [block(content="a")])
    journal.lost()
    crlf = block(content="b").replace(b"\n", b"\r\n")
    assert journal.feed(crlf[:9]) + journal.feed(crlf[9:]) == crlf
    journal.lost()
    assert journal.feed(block(content="c")) == block(content="c")


def test_the_text_is_bounded_as_records_are() -> None:
    memory = JournalMemory(700)
    blocks = list(foreign_blocks("/generate", {"text": ""}, 1))
    journal = made("/generate", blocks[:15], memory)
    assert journal.can_resume(OTHER) and memory.used == 512 + len(
        orjson.loads(blocks[14][6:])["text"]
    )
    memory.limit = memory.used
    assert journal.feed(blocks[15]) == blocks[15]
    assert not journal.can_resume(OTHER) and memory.used == 0
