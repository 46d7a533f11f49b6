"""A program's backend in the same process: ``set_default_backend(radixlm.Engine(...))``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from radixlm.entrypoints.offline import Engine
from radixlm.lang.backend.base_backend import Done, tell
from radixlm.lang.backend.generate_api import GenerateBackend, continued, results
from radixlm.lang.calls import Generated
from radixlm.lang.model_template import template_of
from radixlm.text.chat import ChatTemplate as Rendered
from radixlm.text.chat import load_chat_template
from radixlm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from radixlm.lang.executor import Span, StreamExecutor
    from radixlm.lang.ir import SglSamplingParams


class EngineBackend(GenerateBackend):
    """Calls wait in the engine's event loop: thousands of programs need no threads."""

    has_score_choices = True

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        super().__init__()
        self.engine = engine
        self.chat_template = template_of(self.get_model_name(), chat_template_name, self._own)
        self._holds_ids = _joins(engine.tokenizer)

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

    def _body(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        """With the ids of what was generated, which are never made anew of its text: so the cached
        prefix is found whole."""
        body = super()._body(s, sampling_params)
        if s.spans and self._holds_ids and not s.images_:
            body["input_ids"] = self._ids(body.pop("text"), s.spans)
        return body

    def _ids(self, text: str, spans: Sequence[Span]) -> list[int]:
        ids: list[int] = []
        at, encode = 0, self.engine.tokenizer.encode  # type: ignore[union-attr]
        for start, end, own in spans:
            ids += encode(text[at:start], at == 0) if at < start or at == 0 else []
            ids += own
            at = end
        return ids + (encode(text[at:], False) if at < len(text) else [])

    @property
    def streams_new_text(self) -> bool:
        return self.engine.config.serve.stream_output

    def _generated(self, answer: dict[str, Any]) -> str:
        """The text with its ids, but for those of what ended it; without ids if they make another
        text, such as one that a stop string has cut."""
        text, ids = str(answer["text"]), list(answer.get("output_ids") or ())
        reason = answer["meta_info"].get("finish_reason") or {}
        if ids and reason.get("matched") == ids[-1]:
            ids.pop()
        tokenizer = self.engine.tokenizer
        if not self._holds_ids or not ids or tokenizer is None:
            return text
        return Generated.of(text, ids) if tokenizer.decode(ids, False) == text else text

    def start_generate(self, s: StreamExecutor, params: SglSamplingParams, done: Done) -> None:
        body = self._body(s, params)

        def read(answer: Any) -> tuple[str | list[str], Any]:
            found, metas = results(answer)
            if isinstance(found, list):
                found[0] = self._generated(answer[0])
                return found, metas
            return self._generated(answer), metas

        self.engine.submit(body).add_done_callback(lambda future: tell(future, done, read))

    def start_stream(
        self,
        s: StreamExecutor,
        params: SglSamplingParams,
        add: Callable[[str, Any], None],
        done: Done,
    ) -> None:
        last: dict[str, Any] = {"text": ""}

        def event(answer: dict[str, Any]) -> None:
            nonlocal last
            if self.streams_new_text:
                meta = continued(last.get("meta_info", {}), answer["meta_info"])
                ids = [*last.get("output_ids", ()), *(answer.get("output_ids") or ())]
                text = last["text"] + answer["text"]
                answer = {**answer, "text": text, "output_ids": ids, "meta_info": meta}
            add(answer["text"][len(last["text"]) :], answer["meta_info"])
            last = answer

        def read(_: Any) -> str | None:
            return self._generated(last) if last["text"] else None

        body = {**self._body(s, params), "stream": True}
        self.engine.submit(body, event).add_done_callback(lambda one: tell(one, done, read))

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


def _joins(tokenizer: Tokenizer | None) -> bool:
    """Whether texts that are encoded one by one make the text of both, as they do unless the
    tokenizer puts a space before each."""
    if tokenizer is None:
        return False
    ids = [*tokenizer.encode("a b", False), *tokenizer.encode("c\nd", False)]
    return tokenizer.decode(ids, False) == "a bc\nd"
