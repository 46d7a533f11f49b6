"""Vectors, scores and ranks for the offline engine, with the code of the HTTP routes."""

from typing import Any

from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import ModelInfo
from radixlm.entrypoints.http.pooling.embeddings import EncodeRequest, answer_encode
from radixlm.entrypoints.http.pooling.score import ScoreRequest, answer_score
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.media import make_reader
from radixlm.entrypoints.request_model import make
from radixlm.intake.sessions import Sessions
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.text.chat import load_chat_template
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.sampling_params import SamplingParams


class PoolingCalls:
    """Pooling calls to one engine; run them in the engine's event loop."""

    def __init__(
        self,
        config: ServerConfig,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        intake: TokenizerManager,
    ) -> None:
        self.state = ServerState(
            config=config,
            info=info,
            tokenizer=tokenizer,
            intake=intake,
            model_name=config.serve.served_model_name or info.folder.name,
            defaults=SamplingParams(),
            sessions=Sessions(tokenizer),
            media=make_reader(config, info),
        )
        if tokenizer is not None:
            argument = config.serve.chat_template
            media = self.state.media.placeholders if self.state.media is not None else None
            self.state.template = load_chat_template(tokenizer, argument, info.folder, media)

    async def encode(self, values: dict[str, Any]) -> Any:
        """The answer of /encode to a body of these fields."""
        return await answer_encode(self.state, make(EncodeRequest, values))

    async def score(self, values: dict[str, Any]) -> list[list[float]]:
        """The scores that /v1/score gives to a body of these fields."""
        scores = (await answer_score(self.state, make(ScoreRequest, values)))["scores"]
        return list(scores)
