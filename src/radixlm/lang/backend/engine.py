"""A program's backend in the same process: ``set_default_backend(radixlm.Engine(...))``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from radixlm.entrypoints.offline import Engine
from radixlm.lang.backend.base_backend import Done, tell
from radixlm.lang.backend.generate_api import GenerateBackend, results
from radixlm.lang.chat_template import get_chat_template, get_chat_template_by_model_path

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams


class EngineBackend(GenerateBackend):
    """Calls wait in the engine's event loop: thousands of programs need no threads."""

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        super().__init__()
        self.engine = engine
        self.chat_template = (
            get_chat_template(chat_template_name)
            if chat_template_name
            else get_chat_template_by_model_path(self.get_model_name())
        )

    def get_model_name(self) -> str:
        return str(self.engine.config.model.model_path)

    def start_generate(self, s: StreamExecutor, params: SglSamplingParams, done: Done) -> None:
        body = self._body(s, params)

        def told(answer: Any, error: BaseException | None = None) -> None:
            done(*((None, error) if error is not None else (results(answer),)))

        self.engine.submit(body).add_done_callback(lambda future: tell(future, told))

    def start_stream(
        self,
        s: StreamExecutor,
        params: SglSamplingParams,
        add: Callable[[str, Any], None],
        done: Done,
    ) -> None:
        length = 0

        def event(answer: dict[str, Any]) -> None:
            nonlocal length
            add(answer["text"][length:], answer["meta_info"])
            length = len(answer["text"])

        body = {**self._body(s, params), "stream": True}
        self.engine.submit(body, event).add_done_callback(lambda future: tell(future, done))

    def _post(self, body: dict[str, Any]) -> Any:
        return self.engine.generate(**body)

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        events: Iterator[dict[str, Any]] = self.engine.generate(**body)
        return events

    def flush_cache(self) -> bool:
        return self.engine.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self.engine.get_server_info()

    def shutdown(self) -> None:
        self.engine.shutdown()
