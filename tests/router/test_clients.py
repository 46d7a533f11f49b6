"""Clients that know nothing of gateways: OpenAI's SDK, and a gateway in front of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest

from tests.router.client import ask
from tests.router.processes import Process, gateway_process

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def start_gateway() -> Iterator[Callable[..., Process]]:
    """A gateway as a process."""
    started: list[Process] = []

    def start(*workers: Process) -> Process:
        urls = [worker.url for worker in workers]
        started.append(gateway_process("--worker-urls", *urls, "--policy", "round_robin"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_openai_sdk(
    start_mock: Callable[..., Process], start_gateway: Callable[..., Process]
) -> None:
    """Models, answers, streams and errors, with one base URL changed."""
    worker = start_mock()
    gateway = start_gateway(worker)
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="any", max_retries=0) as client:
        chat = client.chat.completions.create(**CHAT)
        assert chat.choices[0].message.content == "ok"
        events = client.chat.completions.create(**CHAT, stream=True, max_tokens=3)
        assert "".join(e.choices[0].delta.content or "" for e in events) == "t0 t1 t2 "
        assert [model.id for model in client.models.list()] == ["mock"]
        worker.ask("/mock", {"status": 400})
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**CHAT)


async def test_a_stream_outlives_workers_behind_two_gateways(
    start_mock: Callable[..., Process], start_gateway: Callable[..., Process]
) -> None:
    """The inner gateway moves it twice; the outer one and its client see one whole stream."""
    workers = [start_mock("--faults", '{"cut_after": 900, "cut_first": 1}') for _ in range(2)]
    outer = start_gateway(start_gateway(*workers))
    body = CHAT | {"stream": True, "max_tokens": 9}
    answer = await ask(outer.url, "POST", "/v1/chat/completions", body)
    assert answer.is_complete and answer.text == "".join(f"t{i} " for i in range(9))
    assert sum(worker.ask("/mock")["num_resumed"] for worker in workers) == 2
