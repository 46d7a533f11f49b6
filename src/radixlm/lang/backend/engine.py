"""A program's backend in the same process: ``set_default_backend(radixlm.Engine(...))``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from radixlm.entrypoints.offline import Engine
from radixlm.lang.backend.base_backend import Done, tell
from radixlm.lang.backend.generate_api import GenerateBackend, results
from radixlm.lang.model_template import template_of
from radixlm.text.chat import ChatTemplate as Rendered
from radixlm.text.chat import load_chat_template

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams


class EngineBackend(GenerateBackend):
    """Calls wait in the engine's event loop: thousands of programs need no threads."""

    has_score_choices = True

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        super().__init__()
        self.engine = engine
        self.chat_template = template_of(self.get_model_name(), chat_template_name, self._own)

    def _own(self) -> tuple[Rendered, str] | None:
        """The model's chat template, and the BOS that its tokenizer adds by itself."""
        tokenizer, config = self.engine.tokenizer, self.engine.config
        if tokenizer is None or not (config.serve.chat_template or tokenizer.chat_template()):
            return None
        folder = self.engine.info.folder
        rendered = load_chat_template(tokenizer, config.serve.chat_template, folder)
        return rendered, tokenizer.added_bos

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
