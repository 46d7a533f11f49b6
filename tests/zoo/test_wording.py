"""Held-out phrasings are in no training item, and the help's commands are real ones."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from random import Random

import assist
import evaluate
import pytest
from wording import CHOICE, HELD_OUT, SECTIONS, SLOT, TRAINING, Section, mistype, num_expansions

from test_commands import known_flags, read, words_of

AROUND = ("hello", "please", "thanks")


def texts(patterns: list[str]) -> set[str]:
    """Every text of the patterns, without case, marks and "please"."""
    made = set()
    for pattern in patterns:
        parts = re.split(CHOICE.pattern, pattern)
        choices = (part.split("|") if i % 2 else [part] for i, part in enumerate(parts))
        made |= {re.sub(r"[^\w{}+*]+", " ", "".join(c)).strip().lower() for c in product(*choices)}
    return made


def all_sections() -> dict[str, Section]:
    return SECTIONS | {f"help-{name}": section for name, section in assist.topics().items()}


def test_every_task_has_forty_phrasings_and_eight_held_out() -> None:
    shares: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, section in all_sections().items():
        if name not in AROUND:
            held = shares[name.split("-")[0]]
            held[0] += sum(map(num_expansions, section.training))
            held[1] += len(section.held_out)
    # What is said to be remembered, and asked for, is one task.
    tell, recall = shares.pop("tell"), shares.pop("recall")
    shares["memory"] = [a + b for a, b in zip(tell, recall, strict=True)]
    few = {name: held for name, held in shares.items() if held[0] < 40 or held[1] < 8}
    assert not few


def test_no_training_phrasing_is_held_out() -> None:
    for name, section in all_sections().items():
        both = texts(section.training) & texts(section.held_out)
        assert not both, (name, both)


def test_what_stands_around_a_pattern_leaves_its_slots() -> None:
    rng = Random(1)
    for name, section in SECTIONS.items():
        for wording in (TRAINING, HELD_OUT):
            pattern = rng.choice(wording.lines(section))
            made = [wording.dress(rng, pattern) for _ in range(20)]
            assert all(set(SLOT.findall(text)) <= set(SLOT.findall(pattern)) for text in made)
            assert len(set(made)) > 1 or name in AROUND, (name, pattern)


def test_a_typo_changes_one_place_and_keeps_the_ends() -> None:
    rng = Random(2)
    made = {mistype(rng, "Repeat") for _ in range(60)}
    assert all(text[0] == "R" and text[-1] == "t" and 5 <= len(text) <= 7 for text in made)
    assert mistype(rng, "a + b") == "a + b"


def test_help_quotes_commands_that_the_program_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = 0
    for name, topic in assist.topics().items():
        questions += len(topic.training) + len(topic.held_out)
        quoted = assist.commands(topic.answer)
        assert quoted, name
        for line in quoted:
            if line.startswith("radixlm "):
                read(words_of(line), monkeypatch)
            assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known_flags() | {"--help"}, line
    assert questions >= 300


def test_help_names_the_page_that_no_longer_has_a_command() -> None:
    assert assist.quoted("tutorial.md", "radixlm doctor") == "radixlm doctor"
    with pytest.raises(ValueError, match=r"docs/tutorial\.md has no 'radixlm nothing'"):
        assist.quoted("tutorial.md", "radixlm nothing")


def test_help_is_right_when_its_command_is() -> None:
    item = evaluate.evaluation("new-help", 0)
    commands = " ".join(f"`{line}`" for line in assist.commands(item.answer()["content"]))
    assert evaluate.is_right(item, f"Type {commands} now.", [])
    assert not evaluate.is_right(item, "Run `radixlm nothing`.", [])
