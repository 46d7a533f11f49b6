"""Chat templates by name: what stands before and after each role's text.

The templates are SGLang's (``sglang.lang.chat_template`` 0.5.2), with their names and the model
paths that they are for; ``chat_templates.json`` has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any


class ChatTemplateStyle(Enum):
    PLAIN = auto()
    LLAMA2 = auto()  # the system text stands inside of the first user's


@dataclass
class ChatTemplate:
    """``role_prefix_and_suffix``: by role. ``stop_str``: added to the stops of every call."""

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, Sequence[str]]
    stop_str: Sequence[str] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(
        self, role: str, hist_messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str]:
        """What stands around a message of ``role`` after ``hist_messages``."""
        prefix, suffix = self.role_prefix_and_suffix.get(role, ("", ""))
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                prefix = self.role_prefix_and_suffix["user"][0] + prefix
            elif role == "user" and len(hist_messages) == 1 and hist_messages[0]["content"]:
                prefix = ""
        return prefix, suffix

    def get_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of messages; a system message whose content is None has the default one."""
        text = ""
        for index, message in enumerate(messages):
            content = message["content"]
            if content is None and message["role"] == "system":
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(message["role"], messages[:index])
            text += f"{prefix}{content}{suffix}"
        return text


# (pattern, what must not be found, template): the first that fits a model's path is taken
_PATTERNS = (
    (r"deepseek-(v3|r1)", "base", "deepseek-v3"),
    (r"janus", "", "janus-pro"),
    (r"dbrx.*instruct|instruct.*dbrx", "", "dbrx-instruct"),
    (r"vicuna|llava-v1\.5|llava-next-video-7b", "", "vicuna_v1.1"),
    (r"llama-2.*chat|codellama.*instruct", "", "llama-2-chat"),
    (r"pixtral|(mistral|mixtral).*instruct", "", "mistral"),
    (r"llama-3.*instruct", "", "llama-3-instruct"),
    (r"tinyllama", "", "chatml"),
    (r"qwen.*vl", "", "qwen2-vl"),
    (r"glm[-_]?4(\.\d+)?v", "", "glm-4v"),
    (r"qwen.*(chat|instruct)", "llava", "qwen"),
    (
        r"llava-v1\.6-34b|llava-v1\.6-yi-34b|llava-next-video-34b|llava-onevision-qwen2",
        "",
        "chatml-llava",
    ),
    (r"yi-vl", "llava", "yi-vl"),
    (r"yi-1\.5.*chat", "", "yi-1.5"),
    (r"gemma.*it", "", "gemma-it"),
    (r"minicpm-v", "", "minicpmv"),
    (r"minicpm-o", "", "minicpmo"),
    (r"c4ai-command-r", "", "c4ai-command-r"),
    (r"granite.*instruct", "", "granite-3-instruct"),
    (r"gemma-3", "", "gemma-it"),
    (r"internvl2_5", "", "internvl-2-5"),
    (r"intern-?s1", "", "interns1"),
)
_matching: list[Callable[[str], str | None]] = []
_registered: dict[str, ChatTemplate] = {}


@cache
def _shipped() -> dict[str, ChatTemplate]:
    text = (Path(__file__).parent / "chat_templates.json").read_text(encoding="utf-8")
    return {
        name: ChatTemplate(
            name,
            values.get("system_prompt"),
            {role: tuple(pair) for role, pair in values["roles"].items()},
            tuple(values.get("stop", ())),
            values.get("image", "<image>"),
            values.get("audio", "<audio>"),
            ChatTemplateStyle[values.get("style", "PLAIN")],
        )
        for name, values in json.loads(text).items()
    }


def register_chat_template(template: ChatTemplate) -> None:
    """Add a template, or replace one of the same name."""
    _registered[template.name] = template


def register_chat_template_matching_function(
    function: Callable[[str], str | None],
) -> Callable[[str], str | None]:
    """Have ``function`` name the template of a model path, where no shipped rule does."""
    _matching.append(function)
    return function


def get_chat_template(name: str) -> ChatTemplate:
    """KeyError, with all names, if there is none."""
    template = _registered.get(name) or _shipped().get(name)
    if template is None:
        names = ", ".join(sorted({*_shipped(), *_registered}))
        raise KeyError(f"no chat template {name!r}; there are {names}")
    return template


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template for a model by its path or name; "default" if none fits."""
    for pattern, unless, template in _PATTERNS:
        is_excluded = bool(unless) and re.search(unless, model_path, re.IGNORECASE)
        if re.search(pattern, model_path, re.IGNORECASE) and not is_excluded:
            return get_chat_template(template)
    names = (function(model_path) for function in _matching)
    return get_chat_template(next((name for name in names if name), "default"))
