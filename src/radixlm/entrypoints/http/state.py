"""What every route may use; made once, carried by the app."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from radixlm.config.root import ServerConfig
from radixlm.engine.modelinfo import ModelInfo
from radixlm.intake.manager import Intake
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.sampling_params import SamplingParams


@dataclass(slots=True)
class ServerState:
    """``defaults``: sampling values of the model for what a request leaves out."""

    config: ServerConfig
    info: ModelInfo
    tokenizer: Tokenizer | None
    engine: Any  # ProcessEngine | ThreadEngine
    intake: Intake
    model_name: str
    defaults: SamplingParams
    started_s: float = field(default_factory=time.time)
    extras: dict[str, Any] = field(default_factory=dict)


def state_of(request: Request) -> ServerState:
    """The server's state, from any route."""
    found: ServerState = request.app.state.server
    return found
