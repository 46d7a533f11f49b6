"""Built-in prompt formats by name, for checkpoints without a chat template.

A ``Conversation`` holds the texts around system, user and assistant messages; ``source`` writes it
as a Jinja template. The names are those of SGLang's ``--chat-template``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, field, replace

_Affixes = tuple[str, str]
_ASSISTANT = "You are a helpful assistant."
_VISION = (
    "You are a helpful language and vision assistant. You are able to understand the visual "
    "content that the user provides, and assist the user with a variety of tasks using natural "
    "language"
)


class Conversation(Record):
    """A prompt format. ``system`` etc. are the texts before and after a message.

    ``first_user`` replaces ``user`` for the first user message; ``no_system`` replaces a missing
    system message; ``prompt`` is the generation prompt. ``media``: placeholders, where "{index}"
    counts the items from 1.
    """

    user: _Affixes
    assistant: _Affixes
    prompt: str
    system: _Affixes = ("", "")
    default_system: str = ""
    no_system: str = ""
    first_user: _Affixes | None = None
    strips: bool = False
    stops: tuple[str, ...] = ()
    media: Mapping[str, str] = field(default_factory=dict)

    def source(self) -> str:
        """The format as a Jinja template over ``messages`` and ``add_generation_prompt``."""
        first = self.first_user or self.user
        text = "message.content | trim" if self.strips else "message.content"
        return (
            f"{{%- set ns = namespace(system={_quote(self.default_system)}, first=true) -%}}"
            "{%- for message in messages if message.role == 'system' -%}"
            "{%- set ns.system = message.content -%}{%- endfor -%}"
            f"{{%- if ns.system -%}}{{{{- {_quote(self.system[0])} + ns.system"
            f" + {_quote(self.system[1])} -}}}}"
            f"{{%- else -%}}{{{{- {_quote(self.no_system)} -}}}}{{%- endif -%}}"
            "{%- for message in messages if message.role != 'system' -%}"
            "{%- if message.role == 'user' and ns.first -%}"
            f"{{{{- {_quote(first[0])} + ({text}) + {_quote(first[1])} -}}}}"
            "{%- elif message.role == 'user' -%}"
            f"{{{{- {_quote(self.user[0])} + ({text}) + {_quote(self.user[1])} -}}}}"
            "{%- elif message.role == 'assistant' -%}"
            f"{{{{- {_quote(self.assistant[0])} + ({text}) + {_quote(self.assistant[1])} -}}}}"
            "{%- else -%}{{- raise_exception('the role ' + message.role + ' is unknown') -}}"
            "{%- endif -%}{%- set ns.first = false -%}{%- endfor -%}"
            f"{{%- if add_generation_prompt -%}}{{{{- {_quote(self.prompt)} -}}}}{{%- endif -%}}"
        )


def _quote(text: str) -> str:
    return json.dumps(text)


def _chatml(system: str = _ASSISTANT, **changes: Any) -> Conversation:
    base = Conversation(
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        default_system=system,
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant=("<|im_start|>assistant\n", "<|im_end|>\n"),
        prompt="<|im_start|>assistant\n",
        stops=("<|im_end|>",),
    )
    return replace(base, **changes)


def _inst(system: _Affixes, stops: tuple[str, ...], **changes: Any) -> Conversation:
    base = Conversation(
        system=(f"[INST] {system[0]}\n", f"\n{system[1]}\n\n"),
        no_system="[INST] ",
        first_user=("", " "),
        user=("[INST] ", " "),
        assistant=("[/INST] ", " </s><s>"),
        prompt="[/INST]",
        stops=("[INST]", "[/INST]", *stops),
    )
    return replace(base, **changes)


def _headers(open_: str, close: str, end: str, **changes: Any) -> Conversation:
    def header(role: str) -> str:
        return f"{open_}{role}{close}\n\n"

    base = Conversation(
        system=(header("system"), end),
        user=(header("user"), end),
        assistant=(header("assistant"), end),
        prompt=header("assistant"),
        strips=True,
    )
    return replace(base, **changes)


_SYSTEM_PROMPT = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_MISTRAL = _inst(_SYSTEM_PROMPT, _SYSTEM_PROMPT, media={"image": "[IMG]"})
_LLAMA3 = _headers(
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    default_system=_VISION + ".",
    stops=("<|end_of_text|>", "<|eot_id|>"),
)
_END = "<｜end▁of▁sentence｜>"
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_ENDS = ("<|im_end|>", "<|endoftext|>")

CONVERSATIONS: dict[str, Conversation] = {
    "llama-2": _inst(("<<SYS>>", "<</SYS>>"), ("<<SYS>>", "<</SYS>>")),
    "mistral": _MISTRAL,
    "devstral": _MISTRAL,
    "llama-4": _headers(
        "<|header_start|>",
        "<|header_end|>",
        "<|eot|>",
        stops=("<|end_of_text|>", "<|eot|>", "<|eom|>"),
        media={"image": "<|image|>"},
    ),
    "phi-4-mm": Conversation(
        system=("<|system|>", "<|end|>"),
        user=("<|user|>", "<|end|>"),
        assistant=("<|assistant|>", "<|end|>"),
        prompt="<|assistant|>",
        stops=("<|end|>",),
        media={"image": "<|endoftext10|>", "audio": "<|endoftext11|>"},
    ),
    "chatml": _chatml(stops=_ENDS),
    "chatml-llava": _chatml(stops=_ENDS, media={"image": "<image>\n"}),
    "vicuna_v1.1": Conversation(
        system=("", " "),
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        user=("USER: ", " "),
        assistant=("ASSISTANT: ", "</s>"),
        prompt="ASSISTANT:",
        media={"image": "<image>\n"},
    ),
    "llama_3_vision": replace(_LLAMA3, media={"image": "<|image|>\n"}),
    "llava_llama_3": replace(_LLAMA3, media={"image": "<image>\n"}),
    "internlm2-chat": _chatml("", stops=("<|im_end|>", "<|action_end|>")),
    "internvl-2-5": _chatml(
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、"
        "清华大学及多家合作单位联合开发的多模态大语言模型。",
        stops=("<|im_end|>", "<|action_end|>"),
        media={"image": "<image>\n"},
    ),
    "qwen2-vl": _chatml(
        media={"image": _QWEN_IMAGE, "video": "<|vision_start|><|video_pad|><|vision_end|>"}
    ),
    "deepseek-vl2": Conversation(
        system=("", "\n\n"),
        user=("<|User|>: ", "\n\n"),
        assistant=("<|Assistant|>: ", _END),
        prompt="<|Assistant|>:",
        stops=("User:", _END),
        media={"image": "<image>\n"},
    ),
    "gemma-it": Conversation(
        system=("<start_of_turn>user\n", "\n\n"),
        default_system=_ASSISTANT,
        first_user=("", "<end_of_turn>\n"),
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        assistant=("<start_of_turn>model\n", "<end_of_turn>\n"),
        prompt="<start_of_turn>model\n",
        stops=("<end_of_turn>",),
        media={"image": "<start_of_image>"},
    ),
    "gme-qwen2-vl": _chatml(
        prompt="<|im_start|>assistant\n<|endoftext|>",
        stops=("<|endoftext|>",),
        media={"image": _QWEN_IMAGE},
    ),
    "minicpmv": _chatml(stops=_ENDS, media={"image": "(<image>./</image>)\n"}),
    "janus-pro": Conversation(
        system=("", ".\n\n"),
        default_system=_VISION,
        user=("User: ", "\n\n"),
        assistant=("Assistant: ", _END),
        prompt="Assistant:",
        stops=("<|User|>", _END),
        media={"image": "<image_placeholder>\n"},
    ),
    "minicpmo": _chatml(
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        stops=_ENDS,
        media={"image": "(<image>./</image>)\n", "audio": "(<audio>./</audio>)"},
    ),
    "kimi-vl": Conversation(
        system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        default_system="You are a helpful assistant",
        user=("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        assistant=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        prompt="<|im_assistant|>assistant<|im_middle|>",
        stops=("<|im_end|>",),
        media={"image": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"},
    ),
    "qwen2-audio": _chatml(media={"audio": "Audio {index}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"}),
}

# Older checkpoints without a template, by the name of their folder.
_BY_FOLDER = (
    (r"internvl2_5", "internvl-2-5"),
    (r"llama.*3\.2.*vision", "llama_3_vision"),
    (r"janus", "janus-pro"),
    (r"vicuna|llava-v1\.5|llava-next-video-7b", "vicuna_v1.1"),
    (r"llama-2.*chat|codellama.*instruct", "llama-2"),
    (r"devstral", "devstral"),
    (r"pixtral|(mistral|mixtral).*instruct", "mistral"),
    (r"deepseek.*vl2", "deepseek-vl2"),
    (r"gme.*qwen.*vl", "gme-qwen2-vl"),
    (r"qwen.*vl", "qwen2-vl"),
    (r"qwen2.*audio", "qwen2-audio"),
    (r"llava", "chatml-llava"),
    (r"gemma-3.*it", "gemma-it"),
    (r"minicpm-v", "minicpmv"),
    (r"minicpm-o", "minicpmo"),
    (r"kimi.*vl", "kimi-vl"),
    (r"phi-4-multimodal", "phi-4-mm"),
)


def guess_name(folder: str) -> str:
    """The format of a checkpoint that has no template, by its folder; "chatml" if unknown."""
    names = (name for pattern, name in _BY_FOLDER if re.search(pattern, folder, re.IGNORECASE))
    return next(names, "chatml")


def read_json(text: str, origin: str) -> Conversation:
    """A format described in JSON: system, user, assistant, sep_style, sep, sep2, stop_str.

    Raises ConfigError for a missing key or an unknown style.
    """
    try:
        fields = json.loads(text)
        user, assistant = str(fields["user"]), str(fields["assistant"])
        style = str(fields["sep_style"]).upper()
        system, stop = str(fields["system"]), fields.get("stop_str") or ()
    except (ValueError, KeyError, TypeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"--chat-template {origin}: {why}; a conversation format in JSON has system, user, "
            "assistant and sep_style, and a Jinja template is a file that ends in .jinja"
        ) from None
    sep = str(fields.get("sep", "\n"))
    sep2 = str(fields.get("sep2") or sep)
    if style not in _STYLES:
        known = ", ".join(_STYLES)
        raise ConfigError(f"--chat-template {origin}: sep_style {style!r} is none of: {known}")
    between, tail, after_system, newline = _STYLES[style]
    ends = (sep, sep2) if style.endswith("_TWO") else (sep, sep)
    return Conversation(
        system=(f"{system}\n" if system else "", (sep if after_system else "") + newline),
        default_system=str(fields.get("system_message", "")),
        user=(user + between, ends[0] + newline),
        assistant=(assistant + between, ends[1] + newline),
        prompt=assistant + tail,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
    )


# style -> (between role and text, after the role of the prompt, separator after system?, newline)
_STYLES: dict[str, tuple[str, str, bool, str]] = {
    "ADD_COLON_SINGLE": (": ", ":", True, ""),
    "ADD_COLON_TWO": (": ", ":", True, ""),
    "ADD_COLON_SPACE_SINGLE": (": ", ": ", True, ""),
    "ADD_NEW_LINE_SINGLE": ("\n", "\n", True, ""),
    "NO_COLON_SINGLE": ("", "", False, ""),
    "NO_COLON_TWO": ("", "", False, ""),
    "CHATML": ("\n", "\n", True, "\n"),
}
