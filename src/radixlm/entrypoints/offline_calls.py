"""Chat, vectors, scores and ranks for the offline engine, with the code of the HTTP routes."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import orjson

from radixlm.base.errors import EngineError, InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.continuation.sessions import Sessions
from radixlm.engine.intake import ServerIntake
from radixlm.engine.model_info import ModelInfo
from radixlm.entrypoints.answers import ScoreResult
from radixlm.entrypoints.http.errors import FinishError
from radixlm.entrypoints.http.formats import set_formats
from radixlm.entrypoints.http.openai.chat import answer_chat, chat_events
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.pooling.embeddings import EncodeRequest, answer_encode
from radixlm.entrypoints.http.pooling.score import ScoreRequest, answer_score
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.transport import DONE
from radixlm.entrypoints.request_model import make
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.sampling_params import SamplingParams


@contextmanager
def _own_errors() -> Iterator[None]:
    """A request that failed raises what ``Engine.generate`` raises."""
    try:
        yield
    except FinishError as error:
        kind = InvalidRequest if 400 <= error.status < 500 else EngineError
        raise kind(str(error)) from None


class RouteCalls:
    """Calls to one engine that HTTP routes answer too; run them in the engine's event loop."""

    def __init__(
        self,
        config: ServerConfig,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        intake: ServerIntake,
        defaults: SamplingParams,
        sessions: Sessions,
    ) -> None:
        self.state = ServerState(
            config=config,
            info=info,
            tokenizer=tokenizer,
            intake=intake,
            model_name=config.serve.served_model_name or info.folder.name,
            defaults=defaults,
            sessions=sessions,
        )
        if tokenizer is not None:
            set_formats(self.state, tokenizer)

    async def chat(self, values: dict[str, Any]) -> dict[str, Any]:
        """The answer of /v1/chat/completions to a body of these fields."""
        with _own_errors():
            return await answer_chat(self.state, make(ChatRequest, values))

    async def chat_chunks(self, values: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of its stream."""
        body = make(ChatRequest, {**values, "stream": True})
        with _own_errors():
            async with aclosing(chat_events(self.state, body)) as events:
                async for event in events:
                    if event != DONE:
                        yield orjson.loads(event.removeprefix(b"data: "))

    async def encode(self, values: dict[str, Any]) -> Any:
        """The answer of /encode to a body of these fields."""
        return await answer_encode(self.state, make(EncodeRequest, values))

    async def score(self, values: dict[str, Any]) -> ScoreResult:
        """What /v1/score gives to a body of these fields."""
        found = await answer_score(self.state, make(ScoreRequest, values))
        count = found["usage"]["prompt_tokens"]
        return ScoreResult(found["scores"], count, found.get("pooled_hidden_states"))

    async def model_info(self) -> dict[str, Any]:
        """What is served now: the weights of the last update, the parsers that were chosen."""
        state, options = self.state, self.state.config
        return {
            "model_path": state.intake.weights.model_path or str(options.model.model_path),
            "served_model_name": state.model_name,
            "is_generation": state.info.is_generation,
            "weight_version": state.weight_version,
            "load_format": options.model.load_format,
            "reasoning_parser": state.reasoning_format,
            "tool_call_parser": state.tool_format,
            "disaggregation_mode": options.disagg.disaggregation_mode,
        }
