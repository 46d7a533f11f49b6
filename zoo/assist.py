"""Questions about RadixLM, answered with commands that are read from its documentation."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from wording import SECTIONS, Section, Wording, read_sections

DOCS = Path(__file__).parents[1] / "docs"


def quoted(page: str, pattern: str) -> str:
    """The first match of a pattern in a page of docs/, its spaces single; ValueError if none."""
    text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(pattern.replace(" ", r"\s+"), text)
    if found is None:
        raise ValueError(f"docs/{page} has no {pattern!r}: mend the topic in zoo/help.txt")
    return " ".join(found[0].split())


@cache
def topics() -> dict[str, Section]:
    """Topics by name, with the commands of today's documentation in their answers."""
    sections = read_sections(Path(__file__).with_name("help.txt"), SECTIONS)
    made = {}
    for name, section in sections.items():
        lines = section.training
        sources = [line[2:].partition(": ") for line in lines if line.startswith("@ ")]
        answer = section.answer.format(*(quoted(page, pattern) for page, _, pattern in sources))
        made[name] = replace(section, training=lines[len(sources) :], answer=answer)
    return made


def ask(rng: Random, wording: Wording) -> tuple[str, str, str]:
    """(question, answer, thinking) about RadixLM; there is no classic wording."""
    name, section = rng.choice(list(topics().items()))
    question = wording.say(rng, f"help-{name}", section)
    return question, section.answer, "A question about RadixLM."


def commands(text: str) -> list[str]:
    """What a reply has in backticks."""
    return re.findall(r"`([^`]+)`", text)
