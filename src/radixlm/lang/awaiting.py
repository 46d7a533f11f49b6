"""Programs in an event loop: ``async def`` functions and their state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from radixlm.base.lazy import load
from radixlm.lang.backend.generate_api import newest
from radixlm.lang.executor import StreamExecutor
from radixlm.lang.state import ProgramState, Tail

if TYPE_CHECKING:
    from radixlm.lang.function import SglFunction

Arguments = Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]


class AsyncProgramState(ProgramState):
    """The state of an ``async def`` program: it awaits results instead of waiting for them."""

    _num_unnamed = 0

    async def get(self, name: str) -> Any:
        """A variable's value, when it is there; errors as those of ``s[name]``."""
        executor = self.stream_executor
        await self._until(lambda: executor.is_known(name))
        return executor.get_var(name)

    async def gen(self, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Append ``gen(...)``, and await its value."""
        return await self._take("gen", name, *args, **kwargs)

    async def select(self, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Append ``select(...)``, and await the choice."""
        return await self._take("select", name, *args, **kwargs)

    async def settled(self) -> BaseException | None:
        """Await all calls; the first error, if there is one."""
        executor = self.stream_executor
        await self._until(lambda: executor.is_idle)
        return executor.error_

    def get_var(self, name: str) -> Any:
        if not self.stream_executor.is_known(name) and _in_loop():
            raise RuntimeError(f"{name!r} is not there yet: await s.get({name!r})")
        return super().get_var(name)

    async def _take(self, kind: str, name: str | None, *args: Any, **kwargs: Any) -> Any:
        if name is None:
            name = f"_value_{self._num_unnamed}"
            self._num_unnamed += 1
        self.stream_executor.submit(load(f"radixlm.lang.api:{kind}")(name, *args, **kwargs))
        return await self.get(name)

    async def _until(self, is_done: Callable[[], bool]) -> None:
        if is_done():
            return
        changed = asyncio.Event()
        stop = self.stream_executor.listen(asyncio.get_running_loop(), changed)
        try:
            while not is_done():
                await changed.wait()
                changed.clear()
        finally:
            stop()


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def pieces(
    executor: StreamExecutor, var_name: str | None, return_meta_data: bool
) -> AsyncIterator[Any]:
    """``ProgramState.text_async_iter``."""
    changed = asyncio.Event()
    tail = Tail(executor, var_name, is_stream=executor.stream)
    stop = executor.listen(asyncio.get_running_loop(), changed)
    is_new_only, earlier = getattr(executor.backend, "streams_new_text", False), dict[str, Any]()
    try:
        while not tail.is_over:
            await changed.wait()
            changed.clear()
            if piece := tail.take():
                if return_meta_data and var_name is not None:
                    meta = executor.meta_info.get(var_name)
                    yield piece, newest(earlier, meta) if is_new_only and meta else meta
                    earlier = meta or earlier
                else:
                    yield piece
    finally:
        stop()
    executor.raise_error()


async def run(
    program: SglFunction, args: Sequence[Any], backend: Any, kwargs: dict[str, Any]
) -> ProgramState:
    """``SglFunction.arun``."""
    if not program.is_async:
        state = await asyncio.to_thread(program.run, *args, backend=backend, **kwargs)
        await asyncio.to_thread(state.error)
        return state
    setting, rest = program.setting(backend, kwargs)
    return await follow(program, program.state(setting, rest), args, rest)


async def run_batch(
    program: SglFunction,
    batch_kwargs: Arguments,
    backend: Any,
    concurrency: int,
    kwargs: dict[str, Any],
) -> list[ProgramState]:
    """``SglFunction.arun_batch``."""
    if not program.is_async:
        work = partial(program.run_batch, backend=backend, num_threads=concurrency, **kwargs)
        states: list[ProgramState] = await asyncio.to_thread(work, batch_kwargs)
        return states
    batch, setting = program.batch(batch_kwargs, backend, kwargs)
    places = asyncio.Semaphore(concurrency)

    async def one(arguments: dict[str, Any]) -> ProgramState:
        async with places:
            return await follow(program, program.state(setting, arguments), (), arguments)

    tasks = [asyncio.ensure_future(one(arguments)) for arguments in batch]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # after an error of one
            task.cancel()


async def follow(
    program: SglFunction, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ProgramState:
    """Await an ``async def`` function, then all that it has begun."""
    assert isinstance(state, AsyncProgramState)
    try:
        state.ret_value = await program.func(state, *args, **{**kwargs, **program.bind_arguments})
        await state.settled()
    finally:
        state.stream_executor.end()
    return state


def run_in_thread(
    program: SglFunction, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """An ``async def`` that streams, in a thread of its own."""
    try:
        asyncio.run(follow(program, state, args, kwargs))
    except Exception as error:
        state.stream_executor.fail(error)
