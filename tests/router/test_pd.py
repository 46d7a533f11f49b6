"""Pairs of prefill and decode workers, before mock workers."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.router import pd
from radixlm.router.worker import State, Worker
from tests.router.client import Connection, ask, until
from tests.router.conftest import StartWorkers
from tests.router.front import Front
from tests.router.mock_worker import MockWorker

CHAT = "/v1/chat/completions"


class PdFront(Front):
    """A front with prefill and decode workers."""

    def __init__(self, prefills: list[MockWorker], decodes: list[MockWorker], **options: Any):
        super().__init__([], **({"pd_disaggregation": True} | options))
        pd.attach(self.gateway)
        made = [Worker(one.url, worker_type="prefill", bootstrap_port=8998) for one in prefills]
        made += [Worker(one.url, worker_type="decode") for one in decodes]
        self.workers = [self.join(worker) for worker in made]


def bodies(worker: MockWorker) -> list[dict[str, Any]]:
    return [orjson.loads(seen.body) for seen in worker.seen]


async def test_both_get_the_same_room_and_decode_answers(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2)
    async with PdFront([prefill], [decode]) as front:
        for _ in range(2):
            answer = await front.chat(bootstrap_room=7, x=1.5)
            assert answer.status == 200 and answer.json["worker_id"] == decode.worker_id
        await until(lambda: front.is_idle)
    sent = bodies(prefill)
    assert sent == bodies(decode)
    assert {(one["bootstrap_host"], one["bootstrap_port"]) for one in sent} == {("127.0.0.1", 8998)}
    rooms = {one["bootstrap_room"] for one in sent}
    assert len(rooms) == 2 and 7 not in rooms and max(rooms) < 1 << 63
    assert {outcome for _, outcome in front.reports} == {"ok"}


@pytest.mark.parametrize(
    ("path", "fields", "size"),
    [
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/completions", {"prompt": [1, 2, 3]}, None),
        ("/v1/completions", {"prompt": "a", "n": 2}, None),
        ("/v1/completions", {"prompt": [[1], [2]]}, 2),
        ("/generate", {"text": ["a", "b"]}, 2),
        ("/generate", {"input_ids": [[1, 2], [3]]}, 2),
        ("/generate", {"input_ids": [1, 2]}, None),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2}, None),
    ],
)
async def test_a_batch_has_a_room_a_prompt(
    start_workers: StartWorkers, path: str, fields: dict[str, Any], size: int | None
) -> None:
    prefill, decode = await start_workers(2)
    async with PdFront([prefill], [decode]) as front:
        assert (await ask(front.url, "POST", path, fields)).status == 200
    (sent,) = bodies(decode)
    rooms = sent["bootstrap_room"]
    assert (len(set(rooms)) if isinstance(rooms, list) else None) == size
    assert sent["bootstrap_port"] == ([8998] * size if size else 8998)


async def test_ranks_are_told(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2)
    async with PdFront([], [decode]) as front:
        front.join(Worker(prefill.url, worker_type="prefill", dp_rank=2))
        await front.chat()
    assert bodies(prefill)[0]["data_parallel_rank"] == 2
    assert bodies(decode)[0]["disagg_prefill_dp_rank"] == 2
    assert "data_parallel_rank" not in bodies(decode)[0]


async def test_a_failed_prefill_ends_decode_at_once(start_workers: StartWorkers) -> None:
    bad, good = [*await start_workers(1, status=500), *await start_workers(1)]
    (decode,) = await start_workers(1, hang=True)
    async with PdFront([bad], [decode], disable_retries=True) as front:
        answer = await front.chat()
        assert answer.status == 500
        await until(lambda: decode.num_left == len(decode.seen) and front.is_idle)
        assert front.outcomes(bad) == ["error"] and front.outcomes(decode) == []
    decode.faults.hang = False
    async with PdFront([bad, good], [decode]) as front:
        assert [(await front.chat()).status for _ in range(2)] == [200, 200]
        assert "error" not in front.outcomes(decode)


async def test_a_failed_decode_ends_prefill_at_once(start_workers: StartWorkers) -> None:
    (prefill,) = await start_workers(1, hang=True)
    (decode,) = await start_workers(1, status=502)
    async with PdFront([prefill], [decode], disable_retries=True) as front:
        assert (await front.chat()).status == 502
        await until(lambda: prefill.num_left == len(prefill.seen) and front.is_idle)
    assert front.outcomes(prefill) == [] and front.outcomes(decode) == ["error"]


@pytest.mark.parametrize("fault", [{"crash": True}, {"cut_after": 20}, {"status": 503}])
@pytest.mark.parametrize("role", [0, 1])
async def test_another_one_takes_the_place(
    start_workers: StartWorkers, fault: dict[str, Any], role: int
) -> None:
    workers = await start_workers(4)
    bad = workers[2 * role]
    for name, value in fault.items():
        setattr(bad.faults, name, value)
    async with PdFront(workers[:2], workers[2:]) as front:
        answers = [await front.chat(stream=i % 2 > 0, max_tokens=3) for i in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        await until(lambda: front.is_idle)
        assert all(answer.is_complete for answer in answers)
        good = [worker for worker in workers if worker is not bad]
        assert all(set(front.outcomes(worker)) == {"ok"} for worker in good)


async def test_a_clients_fault_is_told_once(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2, status=400)
    async with PdFront([prefill], [decode]) as front:
        assert (await front.chat()).status == 400
    assert len(prefill.seen) == 1 and {outcome for _, outcome in front.reports} <= {"client"}


async def test_a_decode_stream_goes_on_alone_at_another(start_workers: StartWorkers) -> None:
    prefill, one, two = await start_workers(3)
    one.faults.cut_after = 700
    async with PdFront([prefill], [one, two]) as front:
        answer = await front.chat(stream=True, max_tokens=12)
        assert answer.text == "".join(f"t{i} " for i in range(12)) and answer.is_complete
        await until(lambda: front.is_idle)
    assert "bootstrap_room" not in bodies(two)[0] and "resume" in bodies(two)[0]
    assert prefill.seen[0].header(b"x-radixlm-journal") is None


async def test_a_late_prefill_holds_nobody_up(
    start_workers: StartWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.router.pd.PREFILL_LINGER_S", 0.05)
    (prefill,) = await start_workers(1, hang=True)
    (decode,) = await start_workers(1)
    async with PdFront([prefill], [decode]) as front:
        assert (await front.chat()).status == 200
        await until(lambda: front.is_idle and prefill.num_left == 1)
    assert front.outcomes(decode) == ["ok"]


async def test_a_client_that_leaves_ends_both(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2, hang=True)
    async with PdFront([prefill], [decode]) as front:
        async with Connection(front.url) as connection:
            await connection.send("POST", CHAT, {"messages": []})
            await until(lambda: prefill.num_inflight == decode.num_inflight == 1)
        await until(lambda: prefill.num_left == decode.num_left == 1 and front.is_idle)


@pytest.mark.parametrize("left", [0, 1])
async def test_one_of_a_pair_answers_alone(
    start_workers: StartWorkers, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = workers = await start_workers(2)
    async with PdFront([prefill], [decode]) as front:
        registry = front.gateway.registry
        registry.move(front.workers[1 - left], State.UNHEALTHY)
        with monkeypatch.context() as patch:
            patch.setattr(registry, "available", None)  # none that joins is waited for
            for is_stream in (False, True):
                answer = await front.chat(stream=is_stream, max_tokens=3)
                assert answer.status == 200 and answer.is_complete
        assert not workers[1 - left].seen and front.outcomes(workers[left]) == ["ok"] * 2
        assert not any("bootstrap_room" in body for body in bodies(workers[left]))
        front.workers[left].facts = {}  # SGLang's compute nothing without the other
        assert (await front.chat()).status == 503
        await until(lambda: front.is_idle)


async def test_a_stream_goes_on_at_a_prefill_worker_if_no_other_is_left(
    start_workers: StartWorkers,
) -> None:
    prefill, decode = await start_workers(2)
    decode.faults.cut_after = 700
    async with PdFront([prefill], [decode]) as front:
        reported = front.gateway.health.reported

        def out(worker: Worker, outcome: Any) -> None:
            reported(worker, outcome)
            if outcome == "cut":
                front.gateway.registry.move(worker, State.UNHEALTHY)

        front.gateway.health.reported = out
        answer = await front.chat(stream=True, max_tokens=12)
        assert answer.text == "".join(f"t{i} " for i in range(12)) and answer.is_complete
        await until(lambda: front.is_idle)
    assert "resume" in bodies(prefill)[-1] and "bootstrap_room" not in bodies(prefill)[-1]


async def test_calls_leave_a_decode_worker_that_hangs_for_a_prefill_worker(
    start_workers: StartWorkers,
) -> None:
    (prefill,), (decode,) = await start_workers(1), await start_workers(1, hang=True)
    async with PdFront([prefill], [decode]) as front:
        asking = asyncio.create_task(front.chat())
        await until(lambda: decode.num_inflight == 1)
        front.gateway.registry.move(front.workers[1], State.UNHEALTHY)
        assert (await asking).status == 200
        await until(lambda: front.is_idle)
    assert "bootstrap_room" not in bodies(prefill)[-1]


async def test_a_prompts_logprobs_come_once_from_a_decode_worker_alone(
    start_workers: StartWorkers,
) -> None:
    prefill, one, two = await start_workers(3)
    one.faults.crash = True
    async with PdFront([prefill], [one, two], policy="passthrough") as front:
        reported = front.gateway.health.reported

        def out(worker: Worker, outcome: Any) -> None:
            reported(worker, outcome)
            if outcome == "unreachable":
                front.gateway.registry.move(front.workers[0], State.UNHEALTHY)

        front.gateway.health.reported = out
        fields = {"text": "a", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
        answer = await ask(front.url, "POST", "/generate", fields)
        assert answer.status == 200
        alone = await ask(two.url, "POST", "/generate", fields)
    lists = [one.json["meta_info"]["input_token_logprobs"] for one in (answer, alone)]
    assert lists[0] == lists[1]


async def test_embeddings_and_plain_workers(start_workers: StartWorkers) -> None:
    prefill, decode, plain = await start_workers(3)
    async with PdFront([prefill], [decode]) as front:
        assert (await ask(front.url, "POST", "/v1/embeddings", {"input": "a"})).status == 200
        assert (len(prefill.seen), len(decode.seen)) == (1, 0)
        front.join(Worker(plain.url))
        for worker in front.workers:
            front.gateway.registry.move(worker, State.UNHEALTHY)
        assert (await front.chat()).status == 200
    assert len(plain.seen) == 1


async def test_logprobs_of_the_prompt_are_the_prefill_workers(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2)
    async with PdFront([prefill], [decode]) as front:
        answer = await ask(front.url, "POST", "/generate", {"return_logprob": True})
    meta = answer.json["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 1, None]] * 2  # one of each worker
    assert meta["output_token_logprobs"] == [[-0.25, 2, None]]


async def test_scores_of_choices_are_the_decode_workers(start_workers: StartWorkers) -> None:
    prefill, decode = await start_workers(2)
    body = {"text": "a", "score_choices": ["b"], "return_logprob": True}
    async with PdFront([prefill], [decode]) as front:
        answer = await ask(front.url, "POST", "/generate", body)
    assert answer.json["meta_info"]["input_token_logprobs"] == [[-0.5, 1, None]]


def test_logprobs_are_joined_in_streams_and_batches() -> None:
    def event(index: int, told: list[Any]) -> bytes:
        one = {"index": index, "meta_info": {"input_token_logprobs": told}}
        return b"data: " + orjson.dumps(one) + b"\n\n"

    edit = pd.joined_logprobs(event(0, [[1]]) + event(1, [[2]]) + b"data: [DONE]\n\n")
    assert edit(event(1, [[3]]) + event(0, [])) == event(1, [[2], [3]]) + event(0, [[1]])
    assert edit(b": ping\n\ndata: [DONE]\n\n") == b": ping\n\ndata: [DONE]\n\n"
    batch = [{"meta_info": {"input_token_logprobs": [[i]]}} for i in range(2)]
    edit = pd.joined_logprobs(orjson.dumps(batch))
    joined = orjson.loads(edit(orjson.dumps([{"meta_info": {}}, {"meta_info": {}}])))
    assert joined == batch
    assert pd.joined_logprobs(b"<html>")(b"{}") == b"{}"


def test_all_lists_of_the_prompt_are_joined() -> None:
    names = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
    first, second = ({"meta_info": {name: [[i]] for name in names}} for i in range(2))
    joined = orjson.loads(pd.joined_logprobs(orjson.dumps(first))(orjson.dumps(second)))
    assert joined["meta_info"] == {name: [[0], [1]] for name in names}


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_no_answer_breaks_the_join(first: bytes, second: bytes) -> None:
    for data in (
        second,
        b"{" + second,
        b"data: {" + second + b"\n\n",
        b"[1]",
        b'data: {"index":[]}',
    ):
        for told in (
            first,
            b'{"meta_info":' + first + b"}",
            b'{"meta_info":{"input_token_logprobs":7}}',
        ):
            assert isinstance(pd.joined_logprobs(told)(data), bytes)


async def test_vllms_protocol(start_workers: StartWorkers) -> None:
    (decode,) = await start_workers(1)
    told = orjson.dumps({"kv_transfer_params": {"remote_block_ids": [4]}}).decode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(told)}\r\n"
    (prefill,) = await start_workers(1, raw=f"{head}\r\n{told}")
    async with PdFront([prefill], [decode], backend="vllm") as front:
        fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        answer = await front.chat(**fields)
        assert answer.text == "t0 t1 t2 " and front.is_idle
    (first,), (second,) = bodies(prefill), bodies(decode)
    assert (first["stream"], first["max_tokens"], first["stream_options"]) == (False, 1, None)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second == orjson.loads(orjson.dumps(second | fields))
    assert second["kv_transfer_params"] == {"remote_block_ids": [4]}
