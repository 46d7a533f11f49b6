"""Fill-in-the-middle prompts of code models (``--completion-template``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record
from radixlm.text.tokenizer import Tokenizer


class FimTemplate(Record):
    """The order of the text before (prefix) and after (suffix) the gap.

    position "middle": begin prefix MIDDLE suffix end; "end": begin prefix end suffix MIDDLE.
    """

    begin: str
    middle: str
    end: str
    position: Literal["middle", "end"]

    def render(self, prefix: str, suffix: str | None) -> str:
        """The prompt; without a suffix it is the prefix alone."""
        if not suffix:
            return prefix
        if self.position == "middle":
            return f"{self.begin}{prefix}{self.middle}{suffix}{self.end}"
        return f"{self.begin}{prefix}{self.end}{suffix}{self.middle}"


FIM_TEMPLATES = {
    "deepseek_coder": FimTemplate("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "middle"),
    "star_coder": FimTemplate("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "end"),
    "qwen_coder": FimTemplate("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "end"),
}


def detect_fim(tokenizer: Tokenizer) -> FimTemplate | None:
    """The built-in template whose marks are tokens of the model; None if there is none."""
    for template in FIM_TEMPLATES.values():
        marks = (template.begin, template.middle, template.end)
        if all(tokenizer.token_id(mark) is not None for mark in marks):
            return template
    return None


def load_fim_template(argument: str) -> FimTemplate:
    """A built-in name, or a JSON file with fim_begin_token, fim_middle_token, fim_end_token and
    fim_position (MIDDLE or END). ConfigError if it is neither."""
    if argument in FIM_TEMPLATES:
        return FIM_TEMPLATES[argument]
    path = Path(argument)
    if not path.is_file():
        known = ", ".join(FIM_TEMPLATES)
        raise ConfigError(f"--completion-template {argument!r} is no file and none of: {known}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        position = str(fields["fim_position"]).lower()
        begin, middle, end = (str(fields[f"fim_{p}_token"]) for p in ("begin", "middle", "end"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--completion-template {argument}: not a template: {error}") from None
    if position not in ("middle", "end"):
        raise ConfigError(f"--completion-template {argument}: fim_position is MIDDLE or END")
    return FimTemplate(begin, middle, end, "middle" if position == "middle" else "end")
