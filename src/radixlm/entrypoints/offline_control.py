"""State, sessions and ``tokenizer_manager`` of ``radixlm.Engine``, under SGLang's names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from radixlm import __version__
from radixlm.base.errors import EngineError
from radixlm.base.lazy import load
from radixlm.config.server_args import ServerArgs
from radixlm.config.server_config import ServerConfig, flat
from radixlm.continuation.sessions import Sessions
from radixlm.engine.launch import ProgramEngine
from radixlm.engine.located import tokenizer_folder
from radixlm.engine.model_info import ModelInfo

if TYPE_CHECKING:
    from radixlm.entrypoints.offline import Engine

T = TypeVar("T")


class EngineControl:
    """What is asked of an engine besides answers."""

    config: ServerConfig
    info: ModelInfo
    _engine: ProgramEngine
    _sessions: Sessions

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    @property
    def server_args(self) -> ServerArgs:
        """The options, with the values that the engine has chosen for those that were left out."""
        return ServerArgs.of(self.config)

    @property
    def tokenizer_manager(self) -> EngineTokenizerManager:
        """The engine under the names of SGLang's TokenizerManager."""
        return EngineTokenizerManager(cast("Engine", self))

    def flush_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return self._wait(self._engine.intake.control("flush_cache")).ok

    def freeze_gc(self) -> None:
        """Keep Python's garbage collector from looking at what is there now."""
        self._wait(self._engine.intake.control("freeze_gc"))

    def get_server_info(self) -> dict[str, Any]:
        """Options, state of each replica that serves, and version."""
        infos = self._wait(self._engine.intake.control_each("info"))
        return {
            **flat(self.config),
            **self._engine.intake.engine_facts,
            "internal_states": [info.data for info in infos],
            "version": __version__,
        }

    def get_model_info(self) -> dict[str, Any]:
        """The model, the label of its weights, and the parsers of its answers."""
        return self._wait(cast("Engine", self)._route_calls().model_info())

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End one request, or all."""
        self._wait(self._abort(rid, abort_all))

    async def _abort(self, rid: str, abort_all: bool) -> None:
        if abort_all:
            self._engine.intake.abort_all()
        else:
            self._engine.intake.abort(rid)

    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The id of a new session of at most so many tokens (0: no limit), for ``session_params``
        of ``generate``. ``timeout``: seconds without a request after which it is forgotten."""

        async def work() -> str:
            return self._sessions.open(capacity_of_str_len, session_id, timeout or 0.0, streaming)

        return self._wait(work())

    def close_session(self, session_id: str) -> None:
        """Forget a session."""

        async def work() -> None:
            self._sessions.close(session_id)

        self._wait(work())


class ModelConfig:
    """The model under the names of SGLang's ``ModelConfig``; ``hf_config`` needs transformers."""

    def __init__(self, info: ModelInfo) -> None:
        self.model_path = str(info.folder)
        self.context_len = info.context_len
        self.vocab_size = info.decoder.vocab
        self.hidden_size = info.decoder.dim
        self.num_hidden_layers = len(info.decoder.blocks)
        self.is_generation, self.is_multimodal = info.is_generation, info.is_multimodal
        self.hf_eos_token_id = set(info.eos_ids)

    @property
    def hf_config(self) -> Any:
        """config.json as transformers reads it."""
        return load("transformers:AutoConfig").from_pretrained(self.model_path)


class EngineTokenizerManager:
    """An engine as programs for SGLang reach into it: ``engine.tokenizer_manager``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.server_args = engine.server_args
        self.model_config = ModelConfig(engine.info)
        self.model_path = engine.config.model.model_path
        self.served_model_name = engine.config.serve.served_model_name or engine.info.folder.name
        self.is_generation = engine.info.is_generation
        self.context_len = engine.info.context_len

    @property
    def tokenizer(self) -> Any:
        """The tokenizer as transformers reads it; None with ``skip_tokenizer_init``. ImportError
        without transformers."""
        engine = self._engine
        if engine.tokenizer is None:
            return None
        return _hf_tokenizer(str(tokenizer_folder(engine.config, engine.info.folder)))

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """The answer to ``obj``, an object or a dict with the fields of ``/generate``; with
        ``stream`` its events. ``request`` is not used."""
        fields = obj if isinstance(obj, dict) else vars(obj)
        fields = {name: value for name, value in fields.items() if value is not None}
        stream = bool(fields.pop("stream", False))
        answer = await self._engine.async_generate(stream=stream, **fields)
        if not stream:
            yield answer
            return
        async for event in answer:
            yield event

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End one request, or all."""
        self._engine.abort_request(rid, abort_all)

    async def flush_cache(self) -> Any:
        """Forget cached prefixes: an object whose ``success`` is False while requests run."""
        engine = self._engine
        reply = await engine._await(engine._engine.intake.control("flush_cache"))
        return SimpleNamespace(success=reply.ok, message=reply.message)


@cache
def _hf_tokenizer(folder: str) -> Any:
    try:
        return load("transformers:AutoTokenizer").from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise EngineError(f"transformers cannot read the tokenizer in {folder}: {error}") from None
