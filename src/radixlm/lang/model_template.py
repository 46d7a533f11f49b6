"""The model's own chat template, message by message, as a template of the frontend."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from radixlm.base.env import LANG_TEMPLATE
from radixlm.base.errors import InvalidRequest
from radixlm.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
)
from radixlm.text.chat import ChatTemplate as Rendered

log = logging.getLogger(__name__)

_LAST, _NEW = "\u241fLAST\u241f", "\u241fNEW\u241f"  # stand for the texts of two messages
_TALKS = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
)


class ModelTemplate(ChatTemplate):
    """What stands around a message is read from renderings; it depends on the roles before it, not
    on their texts."""

    def __init__(self, rendered: Rendered, bos: str = "") -> None:
        """``bos``: the text of a token that the tokenizer adds by itself. ValueError if the
        template has no place for a message of its own, such as one for the system."""
        super().__init__("model", None, {}, image_token="")
        self.rendered, self.bos = rendered, bos
        self._around = lru_cache(maxsize=256)(self._read)
        for roles in _TALKS:
            for number, role in enumerate(roles):
                end = self._around(role, roles[:number])[1].strip()
        self.stop_str = (end,) if end else ()
        self.image_token = self._between(
            {"type": "image_url", "image_url": {"url": "https://image.invalid"}}
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What ``of`` makes it of again, as JSON."""
        source, tool_source, tokens, _ = json.loads(self.rendered.identity)
        made = {"source": source, "tool_source": tool_source, "special_tokens": tokens}
        return made | {"media": dict(self.rendered.media), "bos": self.bos}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ModelTemplate:
        """The template with these ``facts``."""
        rest = {name: value for name, value in facts.items() if name != "bos"}
        return cls(Rendered(**rest), facts["bos"])

    def _between(self, part: dict[str, Any]) -> str:
        """What stands for a part between two texts of one message, "" for one without a place."""
        content = [{"type": "text", "text": _LAST}, part, {"type": "text", "text": _NEW}]
        try:
            text = self._render([{"role": "user", "content": content}])
        except ValueError:
            return ""
        return text.partition(_LAST)[2].partition(_NEW)[0].strip()

    def get_prefix_and_suffix(
        self, role: str, hist_messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str]:
        return self._around(role, tuple(message["role"] for message in hist_messages))

    def _read(self, role: str, before: tuple[str, ...]) -> tuple[str, str]:
        history = [{"role": one, "content": "text"} for one in before]
        if history:
            history[-1]["content"] = _LAST
        whole = self._render([*history, {"role": role, "content": _NEW}])
        prefix, mark, suffix = whole.partition(_NEW)
        if not mark:
            raise ValueError(f"the chat template has no place for a message of {role!r} here")
        if not history:
            return prefix.removeprefix(self.bos), suffix
        prefix = self._after_last(prefix, history)
        if role == "assistant":
            prefix = self._after_last(self._render(history, opens=True), history)
        return prefix, suffix

    def _after_last(self, text: str, history: list[dict[str, str]]) -> str:
        """What ``text`` has behind the last message of the history and what ends it."""
        end = self._render(history).partition(_LAST)[2]
        rest = text.partition(_LAST)[2]
        if not rest.startswith(end):
            raise ValueError("the chat template ends a message otherwise when another one follows")
        return rest.removeprefix(end)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, opens: bool = False) -> str:
        try:
            return self.rendered.render(list(messages), add_generation_prompt=opens)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error


def template_of(
    model_path: str, name: str | None, make: Callable[[], tuple[Rendered, str] | None]
) -> ChatTemplate:
    """The template of a backend: ``name`` if given, else the model's own, else the one that SGLang
    has for the path. ``make``: the model's template and ``bos``, None without one.
    RADIXLM_LANG_TEMPLATE=reference leaves the model's own out."""
    if name is not None:
        return get_chat_template(name)
    if LANG_TEMPLATE.get() != "reference" and (made := make()) is not None:
        try:
            return ModelTemplate(*made)
        except ValueError as error:
            log.info("the model's chat template is not used by programs: %s", error)
    return get_chat_template_by_model_path(model_path)


def from_tokenizer_info(info: Mapping[str, Any]) -> tuple[Rendered, str] | None:
    """The template and ``bos`` of what /tokenizer_info tells."""
    if not info.get("chat_template"):
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: info[name] for name in names if isinstance(info.get(name), str)}
    bos = tokens.get("bos_token", "") if info.get("adds_bos_token") else ""
    return Rendered(info["chat_template"], tokens), bos
