"""Not run, but checked by mypy in `scripts/check`: the types of the Python API."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import radixlm
from radixlm.entrypoints.answers import Encoding, Generation, ScoreResult

Json = dict[str, Any]


async def wait(engine: radixlm.Engine) -> None:
    assert_type(await engine.async_generate("a"), Generation)
    assert_type(await engine.async_generate(["a"]), list[Generation])
    assert_type(await engine.async_generate("a", stream=True), AsyncIterator[Generation])
    assert_type(await engine.async_chat("a"), Json)
    assert_type(await engine.async_chat("a", stream=True), AsyncIterator[Json])
    assert_type(await engine.async_encode(["a"]), list[Encoding])
    assert_type(await engine.async_score("a", ["b"], [1]), ScoreResult)


def call(arguments: radixlm.ServerArgs) -> None:
    with radixlm.Engine(server_args=arguments, mem_fraction_static=0.5) as engine:
        assert_type(engine, radixlm.Engine)
        assert_type(engine.generate("a"), Generation)
        assert_type(engine.generate("a", {"n": 2}), Generation | Any)
        assert_type(engine.generate("a", {"max_new_tokens": 4})["text"], str | Any)
        assert_type(engine.generate("a", stream=bool(arguments)), Any)
        assert_type(engine.generate(["a"], [{"n": 1}]), list[Generation])
        assert_type(engine.generate("a", stream=True), Iterator[Generation])
        assert_type(engine.generate(input_ids=[1, 2]), Any)
        assert_type(engine.generate("a")["text"], str)
        assert_type(engine.generate("a")["meta_info"]["completion_tokens"], int)
        assert_type(engine.chat("a", max_tokens=4), Json)
        assert_type(engine.chat([{"role": "user"}], stream=True), Iterator[Json])
        assert_type(engine.encode("a"), Encoding)
        assert_type(engine.encode(["a"], dimensions=8), list[Encoding])
        assert_type(engine.rerank([["a", "b"]]), list[Encoding])
        assert_type(engine.score("a", ["b"], [1]), ScoreResult)
        assert_type(engine.flush_cache(), bool)
        assert_type(engine.get_server_info(), Json)
        assert_type(engine.update_weights_from_disk("x"), tuple[bool, str, int])
    assert_type(radixlm.SamplingParams(temperature=0.5).temperature, float)
