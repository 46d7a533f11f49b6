"""Run the prompts of one call, collected or as one stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from radixlm.base.errors import RadixError
from radixlm.entrypoints import beam_search
from radixlm.entrypoints.http.errors import FinishError
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.sequences import paced
from radixlm.intake.records import GenerateRequest, Output

# kind of Finish -> finish_reason
_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "error": "abort"}


def finish_reason(output: Output) -> str | None:
    """OpenAI's finish_reason of a sample, None while it runs."""
    return _REASONS[output.finish.kind] if output.finish else None


def raise_failed(output: Output, names: Mapping[str, str]) -> None:
    """Raise FinishError for a sample that failed, or that a time limit or an operator ended before
    its first token. ``names``: see ``GenerateRequest``."""
    finish = output.finish
    if finish is None or finish.kind in ("stop", "length"):
        return
    if finish.kind == "error" or (finish.status and not output.completion_tokens):
        raise FinishError(finish, names)


async def collect(state: ServerState, requests: Sequence[GenerateRequest]) -> list[list[Output]]:
    """The finished samples of each prompt; if one fails, the others are cancelled."""
    with state.sessions.joined(requests):
        if len(requests) == 1:
            return [await _one(state, requests[0])]
        async with asyncio.TaskGroup() as group:
            made = (group.create_task(_one(state, request)) for request in requests)
            tasks = [task async for task in paced(made)]
    return [task.result() for task in tasks]


async def _one(state: ServerState, request: GenerateRequest) -> list[Output]:
    outputs = await beam_search.collect(state.intake, request)
    for output in outputs:
        raise_failed(output, request.names)
    return outputs


async def stream(
    state: ServerState, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Output], None]:
    """(index of the prompt, delta) as they come. A failure is raised after the deltas before it."""
    with state.sessions.joined(requests):
        if len(requests) == 1:
            async with aclosing(_deltas(state, requests[0])) as deltas:
                async for output in deltas:
                    yield 0, output
            return
        async with aclosing(_merged(state, requests)) as merged:
            async for pair in merged:
                yield pair


async def _deltas(state: ServerState, request: GenerateRequest) -> AsyncGenerator[Output, None]:
    async with aclosing(beam_search.stream(state.intake, request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            raise_failed(output, request.names)
            yield output


async def _merged(
    state: ServerState, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Output], None]:
    queue: asyncio.Queue[tuple[int, Output] | RadixError | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for output in _deltas(state, requests[index]):
                queue.put_nowait((index, output))
        except RadixError as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = []
    try:
        async for task in paced(asyncio.create_task(pump(i)) for i in range(len(requests))):
            tasks.append(task)
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, RadixError):
                raise item
            if item is None:
                left -= 1
                continue
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
