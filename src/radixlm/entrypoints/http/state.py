"""ServerState: what all routes share. The app holds the only one."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from radixlm import __version__
from radixlm.base.errors import InvalidRequest, ModelNotFound
from radixlm.config.server_config import ServerConfig
from radixlm.continuation.sessions import Sessions
from radixlm.engine.intake import ServerIntake
from radixlm.engine.model_info import ModelInfo
from radixlm.entrypoints.media import MediaReader
from radixlm.entrypoints.request_model import Body
from radixlm.text.chat import ChatTemplate
from radixlm.text.fim import FimTemplate
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass(slots=True)
class ServerState:
    """``defaults``: sampling values of the model for what a request leaves out.
    ``tool_format`` and ``reasoning_format``: names of parsers, None where the model has none."""

    config: ServerConfig
    info: ModelInfo
    tokenizer: Tokenizer | None
    intake: ServerIntake
    model_name: str
    defaults: SamplingParams
    sessions: Sessions
    template: ChatTemplate | None = None
    template_defaults: Mapping[str, Any] = field(default_factory=dict)  # variables of it
    media: MediaReader | None = None
    fim: FimTemplate | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    tool_strict_level: int = 0  # of ``base.env.TOOL_STRICT_LEVEL``
    started_s: float = field(default_factory=time.time)
    began_s: float = field(default_factory=time.monotonic)
    ready_after_s: float = 0.0
    base_digest: asyncio.Task[str] | None = None  # of ``resume_digest``, from its first use on
    is_warm: bool = True  # False until the model has answered and --warmups have run
    on_body: Callable[[Body], None] | None = None  # told of the bodies of OpenAI's routes
    extras: dict[type, Any] = field(default_factory=dict)

    def extra(self, kind: type[T]) -> T:
        """The object of class ``kind`` that ``create_app`` made for some of the routes."""
        extra: T = self.extras[kind]
        return extra

    @property
    def weight_version(self) -> str:
        """The label of the weights that new requests get."""
        return self.intake.weights.version

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: it changes when equal requests may get other answers."""
        parts = (__version__, self.info.folder.name, self.weight_version)  # alike on all machines
        return f"fp_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:10]}"

    def check_model(self, name: str | None) -> str:
        """The model name for the answer. One model serves every name, and the answer says which;
        with --strict-model-name ModelNotFound unless it is served, "default" or empty."""
        if not name or name == "default":
            return self.model_name
        if self.adapter_of(name):
            return name
        if self.config.serve.strict_model_name and not self.has_model(name):
            raise self.no_model(name)
        folder = self.info.folder
        paths = (self.config.model.model_path, str(folder), folder.name)
        return name if name in paths else self.model_name

    def adapter_of(self, model: str | None, lora_path: str | None = None) -> str | None:
        """The adapter that a request asks for: ``model`` is its name or "base:adapter", or
        ``lora_path`` its name. ModelNotFound for an adapter of our model that is not loaded, and
        for one that is loaded no more; InvalidRequest if the two differ."""
        adapters, name = self.intake.adapters, None
        if model and not self.has_model(model):
            model = model.removesuffix(":latest")
            base, rest = model.partition(":")[::2]
            if model.startswith(f"{self.model_name}:"):
                base, rest = self.model_name, model.removeprefix(f"{self.model_name}:")
            is_whole = model in adapters or adapters.was_unloaded(model)
            name = model if is_whole else rest.strip() or None
            if name is not None and name not in adapters:
                if base.strip() == self.model_name or adapters.was_unloaded(name):
                    raise self.no_model(model)
                name = None  # a foreign model's name, which has a colon
        if name is not None and lora_path not in (None, name):
            raise InvalidRequest(
                f"model asks for the adapter {name!r:.80}, lora_path for {lora_path!r:.80}: send "
                "one of them",
                "lora_path",
            )
        return name or lora_path

    def no_model(self, name: str) -> ModelNotFound:
        """The error for a model that is not served."""
        is_on = self.intake.adapters.options.is_enabled
        hint = "" if is_on else "; LoRA is not enabled: --enable-lora"
        served = ", ".join(map(repr, (self.model_name, *self.intake.adapters.loaded)))
        return ModelNotFound(
            f"the model {name!r:.200} does not exist; this server has {served:.400}{hint}",
            param="model",
        )

    def has_model(self, name: str) -> bool:
        """Whether the name is one of the served model's; Ollama's clients add ":latest"."""
        folder = self.info.folder
        known = (self.model_name, self.config.model.model_path, str(folder), folder.name)
        return name in known or name.removesuffix(":latest") == self.model_name

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; InvalidRequest with --skip-tokenizer-init."""
        if self.tokenizer is None:
            raise InvalidRequest(
                "this route needs a tokenizer: the server runs with --skip-tokenizer-init"
            )
        return self.tokenizer

    def require_template(self) -> ChatTemplate:
        """The chat template; InvalidRequest if the model has none."""
        self.require_tokenizer()
        if self.template is None:
            raise InvalidRequest("this model has no chat template: start with --chat-template")
        return self.template


def state_of(request: Request) -> ServerState:
    """The server's state, from any route."""
    state: ServerState = request.app.state.server
    return state
