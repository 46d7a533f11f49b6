"""Programs on a model: in process and over HTTP, the same texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import pytest
from tests.end_to_end.server import RunningServer
from tests.lang.backends import in_time

import radixlm as sgl
from radixlm.lang.backend.engine import EngineBackend
from radixlm.lang.global_config import backend_of


@sgl.function
def talk(s: Any, question: str) -> None:
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a", max_tokens=8))
    group = s.fork(3)
    for number, child in enumerate(group):
        child += sgl.user(f"Again {number}.") + sgl.assistant(sgl.gen("b", max_tokens=5))
    group.join()
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("c", ["yes", "no", "maybe"]))
    s += sgl.gen("d", max_tokens=4, regex="[a-c]+", n=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(log_level="error", cpu_threads=1) as made:
        yield made


def read(state: Any) -> list[Any]:
    return [state.text(), *(state[name] for name in "abcd"), state.messages()]


def test_a_batch_equals_one_program_after_the_other(engine: sgl.Engine) -> None:
    questions = [{"question": f"What is {n} + 4?"} for n in range(6)]
    together = in_time(lambda: talk.run_batch(questions, backend=engine, temperature=0))
    alone = [talk.run(**one, backend=engine, temperature=0) for one in questions]
    assert list(map(read, together)) == list(map(read, alone))
    streamed = talk.run(**questions[1], backend=engine, temperature=0, stream=True)
    assert in_time(lambda: "".join(streamed.text_iter("a"))) == alone[1]["a"]


def test_the_choice_has_the_best_mean(engine: sgl.Engine) -> None:
    """Against the log-probabilities that the engine gives of whole prompts: those of the choice and
    of the two tokens before it count, as in SGLang."""
    expr = "The sky is" + sgl.select("x", [" blue", " a b c d"])
    done = sgl.function(lambda s: s.__iadd__(expr)).run(backend=engine)
    means = []
    for choice in (" blue", " a b c d"):
        answer = engine.generate(
            "The sky is" + choice, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        )
        prefix = engine.generate("The sky is", {"max_new_tokens": 0})["meta_info"]
        tokens = answer["meta_info"]["input_token_logprobs"][prefix["prompt_tokens"] - 2 :]
        means.append(sum(token[0] for token in tokens) / len(tokens))
    best = max(range(2), key=lambda index: means[index])
    assert done["x"] == (" blue", " a b c d")[best]
    found = done.get_meta_info("x")["normalized_prompt_logprobs"]
    assert [round(value, 4) for value in found] == [round(value, 4) for value in means]


def test_types_hold_on_a_model(engine: sgl.Engine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "A colour: " + sgl.gen("colour", type=Literal["red", "blue"])
        s += " A number: " + sgl.gen("number", dtype=int, max_tokens=3)

    state = program.run(backend=engine)
    assert state["colour"] in ("red", "blue") and int(state["number"]) >= -999


def test_errors_of_the_engine_are_raised_where_they_are_read(engine: sgl.Engine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a", max_tokens=-5)

    with pytest.raises(sgl.ProgramError, match="max_new_tokens"):
        in_time(lambda: program.run(backend=engine)["a"])


def test_an_engine_a_runtime_and_a_backend_may_be_named(engine: sgl.Engine) -> None:
    backend = backend_of(engine)
    assert isinstance(backend, EngineBackend) and backend_of(engine) is backend
    assert backend_of(backend) is backend
    sgl.set_default_backend(engine)
    try:
        assert sgl.get_server_info()["model_path"] == sgl.get_server_info(engine)["model_path"]
        assert sgl.flush_cache() is True
        assert talk.run(question="Hi", temperature=0)["a"]
    finally:
        sgl.set_default_backend(None)
    assert sgl.flush_cache() is False and sgl.get_server_info() is None


def test_a_server_gives_what_the_engine_gives(engine: sgl.Engine) -> None:
    expected = read(talk.run(question="What is 3 + 4?", backend=engine, temperature=0))
    with RunningServer() as server:
        endpoint = sgl.RuntimeEndpoint(server.url)
        state = talk.run(question="What is 3 + 4?", backend=endpoint, temperature=0)
        assert in_time(lambda: read(state)) == expected
        stream = talk.run(question="What is 3 + 4?", backend=endpoint, temperature=0, stream=True)
        assert in_time(lambda: "".join(stream.text_iter("a"))) == expected[1]
        assert stream.error() is None
        assert endpoint.get_server_info()["version"] and endpoint.flush_cache() is None
        asked = talk.run_batch([("a",), ("b",)], backend=endpoint, max_new_tokens=3)
        assert [len(state["b"]) for state in asked] == [3, 3]
        endpoint._http.close()


def test_events_that_hold_only_what_is_new_make_the_same_text(engine: sgl.Engine) -> None:
    """--incremental-streaming-output: as without it."""

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("What is the capital of France?")
        s += sgl.assistant(sgl.gen("a", return_logprob=True, temperature=0))

    def pieces(backend: Any) -> tuple[str, str, int]:
        state = program.run(backend=backend, stream=True)

        async def collect() -> list[str]:
            return [one async for one in state.text_async_iter("a")]

        text = "".join(asyncio.run(collect()))
        return text, state.text(), len(state.get_meta_info("a")["output_token_logprobs"])

    def counts(backend: Any) -> list[tuple[int, int]]:
        """Tokens and log-probabilities that each piece tells of."""
        state = program.run(backend=backend, stream=True)

        async def collect() -> list[tuple[int, int]]:
            told = [meta async for _, meta in state.text_async_iter("a", return_meta_data=True)]
            return [(m["completion_tokens"], len(m["output_token_logprobs"])) for m in told]

        return asyncio.run(collect())

    wanted = pieces(engine)
    assert "Paris" in wanted[0]
    assert all(tokens == logprobs for tokens, logprobs in counts(engine))
    option = {"incremental_streaming_output": True}
    with sgl.Engine(**option) as own:
        assert pieces(own) == wanted
        told = counts(own)
        totals = accumulate(logprobs for _, logprobs in told)
        assert list(totals) == [tokens for tokens, _ in told]
    with RunningServer("--incremental-streaming-output") as server:
        endpoint = sgl.RuntimeEndpoint(server.url)
        assert pieces(endpoint) == wanted
        endpoint._http.close()


@pytest.mark.parametrize("method", ["token_length", "greedy_token", "unconditional_likelihood"])
def test_choices_are_scored_by_one_request(engine: sgl.Engine, method: str) -> None:
    """The same decision and figures as by a request for the prefix and one for the choices."""
    name = next(n for n in dir(sgl) if n.startswith(method))
    choices = [" blue", "s", " a b c", " \u00e9t\u00e9"]

    @sgl.function
    def program(s: Any) -> None:
        s += "The sky is" + sgl.select("x", choices, choices_method=getattr(sgl, name))

    backend, found = EngineBackend(engine), []
    for backend.has_score_choices in (True, False):
        state = program.run(backend=backend)
        found.append((state["x"], state.get_meta_info("x")))
    assert found[0][0] == found[1][0]
    for key, value in found[0][1].items():
        assert found[1][1][key] == value, key


@pytest.mark.parametrize(
    "fields",
    [{"text": ["a"]}, {"input_ids": [1]}, {"text": "a", "score_choices": []}, {"stream": True}],
)
def test_score_choices_needs_one_text(engine: sgl.Engine, fields: dict[str, Any]) -> None:
    body = {"text": "a", "score_choices": ["b"]} if "stream" in fields else {}
    body = {"score_choices": ["b"], **body, **fields}
    with pytest.raises(Exception, match="score_choices needs one text"):
        list(engine.generate(**body))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": "a" * (1 << 20), "score_choices": ["b"] * 65}, "score fewer in one call"),
        ({"text": "a", "score_choices": ["b"], "sampling_params": [{}]}, "must be one object"),
    ],
)
def test_score_choices_is_bounded(engine: sgl.Engine, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        engine.generate(**fields)


def test_clients_of_other_apis_run_programs() -> None:
    """OpenAI's and Anthropic's own libraries against a server."""

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user("What is 17 + 25?")
        s += sgl.assistant(sgl.gen("a", max_tokens=8))

    with RunningServer() as server:
        fields: dict[str, Any] = {"api_key": "x", "max_retries": 0}
        backends = [
            sgl.OpenAI("radix-tiny", base_url=f"{server.url}/v1", **fields),
            sgl.Anthropic("radix-tiny", base_url=server.url, **fields),
            sgl.Crusoe("radix-tiny", base_url=f"{server.url}/v1", **fields),
        ]
        for backend in backends:
            state = program.run(backend=backend, temperature=0)
            assert "42" in in_time(lambda state=state: state["a"]), type(backend)
            streamed = program.run(backend=backend, temperature=0, stream=True)
            text = in_time(lambda streamed=streamed: "".join(streamed.text_iter("a")))
            assert "42" in text, type(backend)
        assert backends[0].token_usage.completion_tokens > 0
        completion = sgl.OpenAI(
            "radix-tiny", is_chat_model=False, base_url=f"{server.url}/v1", **fields
        )
        state = sgl.function(lambda s: s.__iadd__("Count: 1, 2, " + sgl.gen("b", n=2))).run(
            backend=completion, max_new_tokens=4
        )
        assert len(in_time(lambda: state["b"])) == 2
        for one in (*backends, completion):
            one.client.close()  # type: ignore[attr-defined]


def test_generated_tokens_are_never_made_anew_of_their_text(engine: sgl.Engine) -> None:
    """Texts drawn at a high temperature, most of which a tokenizer would cut otherwise: the second
    call finds all that the first has computed."""

    @sgl.function
    def program(s: Any, number: int) -> None:
        s += f"Text {number}: " + sgl.gen("a", max_tokens=12, regex="[a-z]{40}", seed=number + 90)
        s += sgl.gen("b", max_tokens=2, seed=number + 90)

    encode, others = engine.tokenizer.encode, 0
    for number, is_stream in ((n, n % 2 == 1) for n in range(8)):
        state = program.run(number, backend=engine, temperature=3.0, stream=is_stream)
        first, second = in_time(lambda state=state: list(map(state.get_meta_info, "ab")))
        is_ended = first["finish_reason"]["type"] == "stop"  # by a token that is not in the text
        known = first["prompt_tokens"] + first["completion_tokens"] - is_ended
        assert (second["prompt_tokens"], second["cached_tokens"]) == (known, known - 1)
        others += len(encode(f"Text {number}: {state['a']}")) != known
    assert others > 2, "the texts of this test are no test"


def test_a_template_of_a_model(engine: sgl.Engine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Fill in: " + sgl.template(
            '{"name": "',
            sgl.gen("name", regex="[A-Z][a-z]{2,8}"),
            '", "side": "',
            sgl.select("side", ["north", "south"]),
            '"}',
            max_tokens=64,
        )

    state = program.run(backend=engine)
    found = json.loads(in_time(state.text).removeprefix("Fill in: "))
    assert found == {"name": state["name"], "side": state["side"]}
    assert len(state.trace()["calls"]) == 1
