"""Held-out phrasings are in no training item, and the help's commands are real ones."""

from __future__ import annotations

import re
from collections import defaultdict
from random import Random

import assist
import data
import evaluate
import passages
import pytest
import tasks
import tools
from wording import (
    BLIND,
    BLIND_TEXTS,
    HELD_OUT,
    SECTIONS,
    SLOT,
    TRAINING,
    VALIDATION,
    Section,
    loosen,
    mistype,
    num_expansions,
    plain,
    stray,
)

from test_commands import known_flags, read, words_of

FRAMES = ("do", "about")
AROUND = ("hello", "aside", "please", "thanks", *FRAMES)


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


def test_every_pattern_has_the_slots_of_its_section() -> None:
    optional = {"tool-create_event": {"{h}"}, "tool-book_table": {"{d}"}}
    for name, section in SECTIONS.items():
        patterns = [*section.training, *section.held_out, *section.validation]
        slots = {frozenset(SLOT.findall(line)) - optional.get(name, set()) for line in patterns}
        assert len(slots) == 1 or name == "refuse", (name, slots)


def test_training_says_nothing_that_is_held_out_or_blind() -> None:
    rng = Random(4)
    for name, section in all_sections().items():
        if name not in AROUND:
            said = {plain(TRAINING.say(rng, name, section)) for _ in range(150)}
            assert not said & (section.reserved | BLIND_TEXTS), name


def test_a_reserved_text_is_passed_over() -> None:
    section = Section(
        ["[whats|count] {a}-{b}", "the rest of {a}"], [], "", frozenset(["the rest of {a}"])
    )
    said = {plain(TRAINING.say(Random(seed), "", section)) for seed in range(80)}
    assert plain("whats {a}-{b}") in BLIND_TEXTS
    assert not said & (section.reserved | BLIND_TEXTS)
    assert plain("count {a}-{b}") in said


def test_validation_says_nothing_of_training_or_of_what_is_held_out() -> None:
    sections = all_sections()
    checked = {name for name, section in sections.items() if section.validation}
    kinds = {row.removeprefix("check-") for row in data.CHECKS} - {"tool-one", "tool-two", "greet"}
    assert kinds <= {name.split("-")[0] for name in checked}
    for name in checked:
        section = sections[name]
        assert VALIDATION.lines(section) == section.validation
        assert {plain(text) for text in section.validation} <= section.reserved
        assert not set(section.validation) & {*section.training, *section.held_out}
    assert VALIDATION.lines(Section(["a"], ["b"])) == ["a"]


def test_no_classic_form_is_blind() -> None:
    forms = {*tasks.ADD_FORMS, *tasks.SUBTRACT_FORMS, *tasks.COPY_FORMS, *tasks.GREETINGS}
    forms |= {*tasks.REFUSALS, *(form for tool in tools.TOOLS for form in tool.requests)}
    forms |= {form for _, _, asked in passages.FACTS.values() for form in asked}
    assert not {plain(form) for form in forms} & BLIND_TEXTS


def test_every_blind_task_has_twelve_questions_and_its_rows() -> None:
    assert {f"help-{name}" for name in assist.topics()} <= set(BLIND) <= set(all_sections())
    num: dict[str, int] = defaultdict(int)
    for name, section in BLIND.items():
        num[name.split("-")[0]] += len(section.training)
    assert not {name: n for name, n in num.items() if n < 12}
    for task in data.UNSEEN:
        asked = {data.evaluation(task, seed).prompt()[-1]["content"] for seed in range(80)}
        assert len(asked) >= 12, task


def test_frames_are_about_help_and_refusals_alike() -> None:
    helped, refused = assist.topics()["gguf"].training, SECTIONS["refuse"].training
    for frame in SECTIONS["about"].training:
        head = frame.split("$")[0]
        assert any(line.startswith(head) for line in helped)
        assert any(line.startswith(head) for line in refused)


def test_what_stands_around_a_pattern_leaves_its_slots() -> None:
    rng = Random(1)
    for name, section in SECTIONS.items():
        for wording in (TRAINING, HELD_OUT):
            if name in FRAMES or (name, wording) == ("aside", HELD_OUT):
                continue
            pattern = rng.choice(wording.lines(section))
            made = [wording.dress(rng, pattern) for _ in range(20)]
            assert all(set(SLOT.findall(text)) <= set(SLOT.findall(pattern)) for text in made)
            assert len(set(made)) > 1 or name in AROUND, (name, pattern)


def test_loosening_changes_small_words_and_marks_only() -> None:
    text = "Hi, what is the sum of {a} and {b}, please?"
    made = {loosen(Random(seed), text) for seed in range(400)}
    assert {"Hi what is the sum of {a} and {b} please?", text, text[:-1] + "??"} <= made
    assert any(" the " not in one for one in made)
    for one in made:
        assert SLOT.findall(one) == ["{a}", "{b}"]
        assert {*re.findall(r"[a-z]+", one)} <= {*re.findall(r"[a-z]+", text)}


def test_stray_words_stand_between_two_others() -> None:
    text = "How far is {a} from {b}, please?"
    rng = Random(3)
    for _ in range(40):
        made = stray(rng, text).split(" ")
        assert 1 <= len(made) - len(text.split(" ")) <= 2
        left = iter(made)
        assert all(word in left for word in text.split(" "))
        assert made[0] == "How" and made[-4:] == ["{a}", "from", "{b},", "please?"]
    assert stray(rng, "{a} + {b}") == "{a} + {b}"


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
