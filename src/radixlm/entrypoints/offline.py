"""``radixlm.Engine``: the whole engine inside a Python program.

The engine runs in threads of the calling process, several ranks or replicas in processes of their
own; every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload
from weakref import WeakSet

from tqdm import tqdm

from radixlm.base.errors import EngineError, InvalidRequest, RadixError
from radixlm.base.lazy import load
from radixlm.config.flat_options import read_values
from radixlm.config.server_args import ServerArgs
from radixlm.config.server_config import ServerConfig
from radixlm.continuation.sessions import Sessions
from radixlm.engine.downloaded import delete_checkpoint
from radixlm.engine.launch import engine_for_program, intake_tokenizer, start
from radixlm.engine.model_info import resolved
from radixlm.entrypoints import beam_search
from radixlm.entrypoints.answers import Encoding, Generation, ScoreResult
from radixlm.entrypoints.media import make_reader
from radixlm.entrypoints.native.request import Batch, default_sampling, read_generate
from radixlm.entrypoints.native.response import ResponseBuilder
from radixlm.entrypoints.offline_control import EngineControl
from radixlm.entrypoints.offline_debug import EngineDebug
from radixlm.entrypoints.offline_lora import EngineLora
from radixlm.entrypoints.offline_weights import EngineWeights
from radixlm.entrypoints.reasoning import apply_reasoning, make_strict, needs_parser
from radixlm.entrypoints.sequences import likeliest
from radixlm.wire.replies import Finish

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
Params: TypeAlias = Json | list[Json] | None
Prompts: TypeAlias = str | list[str] | None
Messages: TypeAlias = str | list[Json]
Prompt: TypeAlias = str | list[int]
Items: TypeAlias = str | list[str] | list[list[int]]
No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]
LONG_BATCH = 16
STOP_S, CANCEL_S = 60.0, 10.0  # an engine that does not end in order is left
_engines: WeakSet[Engine] = WeakSet()  # that run
_SHUT = "this engine was shut down: make a new radixlm.Engine"


class Engine(EngineWeights, EngineLora, EngineControl, EngineDebug):
    """The engine of the server, without a server.

        with radixlm.Engine(model_path="radix-tiny") as engine:
            engine.generate("Hello", {"max_new_tokens": 16, "temperature": 0})["text"]
            engine.chat("What is 17 + 25?")["choices"][0]["message"]["content"]

    Keyword arguments are the server's options with underscores (docs/server-arguments.md); they win
    over those of ``server_args``. ConfigError or CheckpointError if the model cannot be served.
    Every method may be called from any thread; those named ``async_...`` are for callers with an
    event loop. InvalidRequest: a field is wrong. EngineError: a request failed, or the engine was
    shut down, as leaving the ``with`` block does.
    """

    _is_shut = True  # until its threads run

    def __init__(self, *, server_args: ServerArgs | None = None, **options: Any) -> None:
        options = {**(server_args.given() if server_args is not None else {}), **options}
        given = frozenset(read_values(options, "argument "))
        config = ServerConfig.from_kwargs(**options)
        self.config, self.info = resolved(config, given)
        self.tokenizer = intake_tokenizer(self.config, self.info)
        self._media = make_reader(self.config, self.info)
        self._defaults = default_sampling(self.info.generation, self.config.serve)
        self._engine = engine_for_program(self.config, given, self.info, self.tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="intake", daemon=True)
        self._thread.start()
        self._is_shut = False
        _engines.add(self)
        self._tracer: Any = None  # with --enable-trace
        self._calls: Any = None
        self._sessions = Sessions(self.tokenizer)
        self._engine.intake.observers = (*self._engine.intake.observers, self._sessions)
        try:
            self._wait(self._start())
        except RadixError:
            self.shutdown()
            raise

    async def _start(self) -> None:
        if (observe := self.config.observe).enable_trace:
            name = self.config.serve.served_model_name or self.info.folder.name
            trace = load("radixlm.live_feed.tracing:trace_intake")
            self._tracer = trace(self._engine.intake, observe.oltp_traces_endpoint, name)
        await start(self._engine)
        delete_checkpoint(self.config)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the engine's loop; EngineError after ``shutdown``."""
        if self._is_shut:
            work.close()
            raise EngineError(_SHUT)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._submit(work).result()
        except CancelledError:
            raise EngineError(_SHUT) from None

    # ---- generate --------------------------------------------------------------------------

    # fmt: off
    @overload
    def generate(self, prompt: str, sampling_params: None = None, *, stream: No = False,
        show_progress: bool | None = None, **fields: Any) -> Generation: ...
    @overload  # a list with n > 1
    def generate(self, prompt: str, sampling_params: Json, *, stream: No = False,
        show_progress: bool | None = None, **fields: Any) -> Generation | Any: ...
    @overload
    def generate(self, prompt: list[str], sampling_params: Params = None, *, stream: No = False,
        show_progress: bool | None = None, **fields: Any) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Prompts = None, sampling_params: Params = None, *, stream: Yes,
        show_progress: bool | None = None, **fields: Any) -> Iterator[Generation]: ...
    @overload
    def generate(self, prompt: Prompts = None, sampling_params: Params = None, *,
        stream: bool = False, show_progress: bool | None = None, **fields: Any) -> Any: ...
    # fmt: on
    def generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        *,
        stream: bool = False,
        show_progress: bool | None = None,
        **fields: Any,
    ) -> Any:
        """Answer one prompt or a list of them, with the fields of ``/generate`` (input_ids,
        image_data, return_logprob, lora_path, ...). A dict; a list of dicts for a list or ``n`` > 1
        in ``sampling_params``; with ``stream`` an iterator of dicts whose text is cumulative. Long
        lists show a progress bar on a terminal (``show_progress``: always or never)."""
        batch = self._batch(prompt, sampling_params, stream, fields)
        if stream:
            return self._iterate(self._events(batch))
        if show_progress is None:
            show_progress = len(batch.requests) >= LONG_BATCH and sys.stderr.isatty()
        return self._wait(self._collect(batch, show_progress))

    def submit(
        self, fields: dict[str, Any], on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> Future[Any]:
        """Begin ``generate`` with the fields of ``/generate``, and return at once: a future of the
        answer. With ``on_event`` that function gets the events of a stream, in the engine's thread,
        where it must not wait."""
        batch = self._batch(None, None, on_event is not None, fields)
        if on_event is None:
            return self._submit(self._collect(batch, False))
        take = on_event

        async def pump() -> None:
            async for event in self._events(batch):
                take(event)

        return self._submit(pump())

    # fmt: off
    @overload
    async def async_generate(self, prompt: str, sampling_params: None = None, *,
        stream: No = False, **fields: Any) -> Generation: ...
    @overload
    async def async_generate(self, prompt: str, sampling_params: Json, *,
        stream: No = False, **fields: Any) -> Generation | Any: ...
    @overload
    async def async_generate(self, prompt: list[str], sampling_params: Params = None, *,
        stream: No = False, **fields: Any) -> list[Generation]: ...
    @overload
    async def async_generate(self, prompt: Prompts = None, sampling_params: Params = None, *,
        stream: Yes, **fields: Any) -> AsyncIterator[Generation]: ...
    @overload
    async def async_generate(self, prompt: Prompts = None, sampling_params: Params = None, *,
        stream: bool = False, **fields: Any) -> Any: ...
    # fmt: on
    async def async_generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """``generate`` for a caller with an event loop of its own."""
        batch = self._batch(prompt, sampling_params, stream, fields)
        if stream:
            return self._aiterate(self._events(batch))
        return await self._await(self._collect(batch, False))

    # fmt: off
    @overload
    def chat(self, messages: Messages, *, stream: No = False, **fields: Any) -> Json: ...
    @overload
    def chat(self, messages: Messages, *, stream: Yes, **fields: Any) -> Iterator[Json]: ...
    # fmt: on
    def chat(self, messages: Messages, *, stream: bool = False, **fields: Any) -> Any:
        """Answer a conversation: messages with ``role`` and ``content`` (a str: one of the user),
        and the fields of ``/v1/chat/completions`` (max_tokens, tools, response_format, ...). Its
        answer as a dict, with ``stream`` an iterator of its chunks. InvalidRequest for a wrong
        field."""
        values = _chat_values(messages, fields)
        if stream:
            return self._iterate(self._route_calls().chat_chunks(values))
        return self._wait(self._route_calls().chat(values))

    # fmt: off
    @overload
    async def async_chat(
        self, messages: Messages, *, stream: No = False, **fields: Any) -> Json: ...
    @overload
    async def async_chat(
        self, messages: Messages, *, stream: Yes, **fields: Any) -> AsyncIterator[Json]: ...
    # fmt: on
    async def async_chat(self, messages: Messages, *, stream: bool = False, **fields: Any) -> Any:
        """``chat`` for a caller with an event loop of its own."""
        values = _chat_values(messages, fields)
        if stream:
            return self._aiterate(self._route_calls().chat_chunks(values))
        return await self._await(self._route_calls().chat(values))

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """``_wait`` for a caller with an event loop of its own."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled() and self._is_shut:
                raise EngineError(_SHUT) from None
            raise

    def _batch(
        self, prompt: Any, sampling_params: Any, stream: bool, fields: dict[str, Any]
    ) -> Batch:
        body = {**fields, "stream": stream}
        if prompt is not None:
            body["text"] = prompt
        if sampling_params is not None:
            body["sampling_params"] = sampling_params
        batch = read_generate(body, self._defaults)
        batch.read_media(self._media)
        is_strict = self.config.serve.enable_strict_thinking
        for request in batch.requests:
            if is_strict or needs_parser(request):
                apply_reasoning(request, parser := self._route_calls().state.reasoning_format)
                if is_strict:
                    make_strict(request, parser)
        return batch

    def _builder(self, batch: Batch) -> ResponseBuilder:
        dim = self._engine.intake.facts.embed_dim
        return ResponseBuilder(self.tokenizer, batch, self._engine.intake.weights.version, dim)

    async def _collect(self, batch: Batch, show_progress: bool) -> Any:
        intake = self._engine.intake
        builder = self._builder(batch)
        bar = tqdm(total=len(batch.requests), disable=not show_progress, unit="prompt")

        async def one(index: int) -> list[dict[str, Any]]:
            outputs = await beam_search.collect(intake, batch.requests[index])
            bar.update()
            for output in outputs:
                if output.finish is not None and output.finish.kind == "error":
                    raise _error(output.finish)
            shown = likeliest(outputs, batch.num_shown)
            return builder.joined(index, [builder.response(index, output) for output in shown])

        try:
            with self._sessions.joined(batch.requests):
                answers = await asyncio.gather(*(one(i) for i in range(len(batch.requests))))
        finally:
            bar.close()
        flat_answers = [answer for group in answers for answer in group]
        return flat_answers if batch.is_list else flat_answers[0]

    def _iterate(self, events: AsyncIterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Outputs pass from the engine's loop to the caller's thread through a queue."""
        queue: SimpleQueue[Any] = SimpleQueue()

        async def pump() -> None:
            try:
                async for event in events:
                    queue.put(event)
                queue.put(None)
            except RadixError as error:
                queue.put(error)
            except asyncio.CancelledError:
                queue.put(EngineError(_SHUT))
                raise

        future = self._submit(pump())
        try:
            while (event := queue.get()) is not None:
                if isinstance(event, RadixError):
                    raise event
                yield event
        finally:
            future.cancel()

    async def _aiterate(
        self, events: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[dict[str, Any]]:
        here = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for event in events:
                    here.call_soon_threadsafe(queue.put_nowait, event)
                here.call_soon_threadsafe(queue.put_nowait, None)
            except RadixError as error:
                here.call_soon_threadsafe(queue.put_nowait, error)
            except asyncio.CancelledError:
                with suppress(RuntimeError):  # the caller's loop may have ended
                    here.call_soon_threadsafe(queue.put_nowait, EngineError(_SHUT))
                raise

        future = self._submit(pump())
        try:
            while (event := await queue.get()) is not None:
                if isinstance(event, RadixError):
                    raise event
                yield event
        finally:
            future.cancel()

    async def _events(self, batch: Batch) -> AsyncIterator[dict[str, Any]]:
        batch.stream_disjoint = self.config.serve.stream_output
        builder = self._builder(batch)
        with self._sessions.joined(batch.requests):
            async for event in builder.stream(self._engine.intake):
                yield event

    # ---- vectors and scores ----------------------------------------------------------------

    # fmt: off
    @overload
    def encode(self, prompt: str, **fields: Any) -> Encoding: ...
    @overload
    def encode(self, prompt: list[str], **fields: Any) -> list[Encoding]: ...
    @overload
    def encode(self, prompt: None = None, **fields: Any) -> Any: ...
    # fmt: on
    def encode(self, prompt: Prompts = None, **fields: Any) -> Any:
        """A dict with the "embedding" (or the scores) of a prompt, a list of them for a list; with
        the fields of ``/encode`` (input_ids, dimensions, prompt_name, ...)."""
        values = fields if prompt is None else {**fields, "text": prompt}
        return self._wait(self._route_calls().encode(values))

    # fmt: off
    @overload
    async def async_encode(self, prompt: str, **fields: Any) -> Encoding: ...
    @overload
    async def async_encode(self, prompt: list[str], **fields: Any) -> list[Encoding]: ...
    @overload
    async def async_encode(self, prompt: None = None, **fields: Any) -> Any: ...
    # fmt: on
    async def async_encode(self, prompt: Prompts = None, **fields: Any) -> Any:
        """``encode`` for a caller with an event loop of its own."""
        values = fields if prompt is None else {**fields, "text": prompt}
        return await self._await(self._route_calls().encode(values))

    def rerank(self, prompt: list[list[str]]) -> list[Encoding]:
        """Scores of a cross-encoder for pairs [query, document], as ``encode`` gives."""
        answers: list[Encoding] = self.encode(text=prompt, is_cross_encoder_request=True)
        return answers

    def score(
        self, query: Prompt, items: Items, label_token_ids: list[int] | None = None, **fields: Any
    ) -> ScoreResult:
        """What ``/v1/score`` gives: for each item the probabilities of ``label_token_ids`` after
        query and item (the scores of a score head), ``[items][labels]``; with its other fields
        (apply_softmax, item_first, return_pooled_hidden_states)."""
        values = {**fields, "query": query, "items": items, "label_token_ids": label_token_ids}
        scores: ScoreResult = self._wait(self._route_calls().score(values))
        return scores

    async def async_score(
        self, query: Prompt, items: Items, label_token_ids: list[int] | None = None, **fields: Any
    ) -> ScoreResult:
        """``score`` for a caller with an event loop of its own."""
        values = {**fields, "query": query, "items": items, "label_token_ids": label_token_ids}
        return await self._await(self._route_calls().score(values))

    def _route_calls(self) -> Any:
        """Made when first needed, since it imports the HTTP request models."""
        if self._calls is None:
            make, intake = load("radixlm.entrypoints.offline_calls:RouteCalls"), self._engine.intake
            facts = self.config, self.info, self.tokenizer, intake, self._defaults
            self._calls = make(*facts, self._sessions)
        return self._calls

    # ---- the rest --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the engine; calling it twice is fine. Calls that run, and all later ones, raise
        EngineError."""
        if self._is_shut:
            return
        self._is_shut = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if self._tracer is not None:
            self._tracer.close()
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        await self._updates.groups.close()
        await self._engine.stop()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_S)

    def __del__(self) -> None:
        """An engine that nobody holds ends in a thread of its own: a collection may be in any one,
        the engine's too. The end of the program waits for it. A forked process has the object, but
        not its threads."""
        if not self._is_shut and self._thread.is_alive() and not sys.is_finalizing():
            threading.Thread(target=self.shutdown).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


@atexit.register
def _shut_all() -> None:
    """Threads that still compute when the interpreter ends would abort the process."""
    for engine in tuple(_engines):
        if engine._thread.is_alive():  # a forked process has none
            engine.shutdown()


def _chat_values(messages: str | list[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {**fields, "messages": messages}


def _error(finish: Finish) -> RadixError:
    """The exception for a request that failed."""
    message = finish.message or "the request failed"
    if 400 <= finish.status < 500:
        return InvalidRequest(message)
    return EngineError(message)
