"""How tasks are asked: the patterns of phrasings.txt, with courtesy, case and typos around them.

A held-out pattern is in no training item, whatever stands around it: `Wording` keeps the shares
apart. The first edition's few forms are the "classic" wording; its score table keeps them.
blind.txt was written before its writer had read the others, and nobody trains on it either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from random import Random

import words

CHOICE = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"(\{\w*\})")
WORD = re.compile(r"[A-Za-z]{4,}")
CLASSIC_SHARE = 0.2  # of the training items, so that nothing old is forgotten
COURTESY, GREETING, THANKS, BARE, SMALL, LOUD, TYPO = 0.25, 0.12, 0.12, 0.3, 0.1, 0.03, 0.08
ASIDE, STRAY = 0.06, 0.1  # training only: a sentence before the question, unknown words inside it
TERSE, UNMARKED, ENDING = 0.04, 0.04, 0.06  # training only: see `loosen`
SMALL_WORDS = re.compile(r" (?:the|a|an|me|it|is|are|do|please|you|my)(?= [a-z])")
GAP = re.compile(r"(?<=[a-z]) (?=[a-z]+\b)")


@dataclass(frozen=True, slots=True)
class Section:
    """The patterns of one kind of question, and the fixed answer of some."""

    training: list[str]
    held_out: list[str]
    answer: str = ""
    reserved: frozenset[str] = frozenset()  # plain texts that no training item has
    validation: list[str] = field(default_factory=list)


def plain(text: str) -> str:
    """The text without case and marks, so that near copies are equal; signs of sums stay."""
    return re.sub(r"[^\w{}+*/=-]+", " ", text).strip().lower()


def framed(line: str, frames: Mapping[str, Section]) -> list[str]:
    """A line's pattern, or every frame about what stands behind its `+ ` or `= `."""
    kind = {"+ ": "do", "= ": "about"}.get(line[:2])
    if kind is None:
        return [line]
    return [frame.replace("$", f"[{line[2:]}]") for frame in frames[kind].training]


def read_sections(path: Path, frames: Mapping[str, Section] | None = None) -> dict[str, Section]:
    """Sections by name: `# name = answer`, then a pattern a line, `! ` before held-out ones and
    `? ` before those of the validation items.

    The frames of `+ ` and `= ` lines are the file's own where none are given.
    """
    sections: dict[str, Section] = {}
    _, *blocks = re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.M)
    for block in blocks:
        head, *lines = block.split("\n")
        name, _, answer = head.partition(" = ")
        shares: dict[str, list[str]] = defaultdict(list)
        for line in filter(None, lines):
            mark = line[:2] if line[:2] in ("! ", "? ") else ""
            pattern = line.removeprefix(mark).replace(r"\n", "\n")
            shares[mark] += framed(pattern, frames or sections)
        kept = shares["! "] + shares["? "]
        reserved = frozenset(plain(text) for line in kept for text in expansions(line))
        sections[name] = Section(shares[""], shares["! "], answer, reserved, shares["? "])
    return sections


def expansions(pattern: str) -> list[str]:
    """Every text of a pattern, without what `dress` puts around it."""
    parts = CHOICE.split(pattern)
    choices = (part.split("|") if i % 2 else [part] for i, part in enumerate(parts))
    return ["".join(chosen) for chosen in product(*choices)]


def num_expansions(pattern: str) -> int:
    """How many texts a pattern stands for, without what `dress` puts around it."""
    return prod(len(choice.split("|")) for choice in CHOICE.findall(pattern))


def expand(rng: Random, pattern: str) -> str:
    """One text of a pattern."""
    return CHOICE.sub(lambda found: rng.choice(found[1].split("|")), pattern)


SECTIONS = read_sections(Path(__file__).with_name("phrasings.txt"))
BLIND = read_sections(Path(__file__).with_name("blind.txt"))
BLIND_TEXTS = frozenset(plain(line) for section in BLIND.values() for line in section.training)


@dataclass(frozen=True, slots=True)
class Wording:
    """Where questions take their words from: "classic", "training", "validation", "held_out" or
    "blind"."""

    share: str

    @property
    def is_wide(self) -> bool:
        """Whether the second edition's larger numbers and stranger words occur."""
        return self.share != "classic"

    def is_classic(self, rng: Random) -> bool:
        """Whether the next question has one of the first edition's forms."""
        return not self.is_wide or (self.share == "training" and rng.random() < CLASSIC_SHARE)

    def lines(self, section: Section) -> list[str]:
        """The patterns of this share; where no validation patterns are, those of training."""
        if self.share == "validation":
            return section.validation or section.training
        return section.held_out if self.share == "held_out" else section.training

    def pick(self, rng: Random, kind: str, classic: Sequence[str]) -> str:
        """A question of one kind, its slots still in braces."""
        if classic and self.is_classic(rng):
            return classic[0] if len(classic) == 1 else rng.choice(classic)
        return self.say(rng, kind, SECTIONS[kind])

    def say(self, rng: Random, kind: str, section: Section) -> str:
        """A question of a section; blind ones as they were written."""
        if self.share == "blind":
            return rng.choice(BLIND[kind].training)
        kept = section.reserved | BLIND_TEXTS if self.share == "training" else frozenset()
        while True:
            text = expand(rng, rng.choice(self.lines(section)))
            made = self.dress(rng, text)
            if kept.isdisjoint((plain(text), plain(made))):
                return made

    def extra(self, rng: Random, kind: str) -> str:
        """A greeting, a "please" or thanks of this share."""
        return expand(rng, rng.choice(self.lines(SECTIONS[kind])))

    def dress(self, rng: Random, pattern: str) -> str:
        """One text of a pattern with what people write around it; slots stay as they are."""
        text = expand(rng, pattern)
        while "~" in text:
            kind = self.extra(rng, "please") + " " if rng.random() < COURTESY else ""
            text = text.replace("~", kind, 1)
        if text[-1] in ".?" and rng.random() < BARE:
            text = text[:-1]
        if rng.random() < 0.7:
            text = text[0].upper() + text[1:]
        is_whole = "{" in text or text.count(" ") > 1  # else it is a greeting itself
        if is_whole and text[-1] in ".?" and rng.random() < THANKS:
            text = f"{text} {self.extra(rng, 'thanks')}"
        if is_whole and self.share == "training" and rng.random() < ASIDE:
            text = f"{self.extra(rng, 'aside')} {text}"
        if is_whole and rng.random() < GREETING:
            text = f"{self.extra(rng, 'hello')} {text}"
        if is_whole and self.share == "training":
            text = loosen(rng, text)
        parts = SLOT.split(text)
        if is_whole and self.share == "training" and rng.random() < STRAY:
            at = rng.randrange(0, len(parts), 2)
            parts[at] = stray(rng, parts[at])
        chance = rng.random()
        if chance < SMALL + LOUD:
            parts[::2] = [p.lower() if chance < SMALL else p.upper() for p in parts[::2]]
        elif chance < SMALL + LOUD + TYPO:
            at = rng.randrange(0, len(parts), 2)
            parts[at] = mistype(rng, parts[at])
        return "".join(parts)


def stray(rng: Random, text: str) -> str:
    """The text with one or two words between two others that mean nothing there.

    So the model learns what words it may not know, and that they change nothing.
    """
    gaps = [found.start() for found in GAP.finditer(text)]
    if not gaps:
        return text
    at = rng.choice(gaps)
    made = [
        words.invented(rng) if rng.random() < 0.6 else rng.choice(words.PLAIN)
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return " ".join((text[:at], *made)) + text[at:]


def loosen(rng: Random, text: str) -> str:
    """Now and then without a small word or a mark, with another end, or with a sentence behind."""
    chance = rng.random()
    if chance < TERSE:
        return SMALL_WORDS.sub(lambda found: found[0] if rng.random() < 0.5 else "", text)
    if chance < TERSE + UNMARKED:
        return re.sub(r"[,'](?=[ a-z])", "", text)
    if chance < TERSE + UNMARKED + ENDING and text[-1] in ".?!":
        return text[:-1] + rng.choice(("!", "??", "...", " ?", "!!", " !", "?!", "\n"))
    return text


def mistype(rng: Random, text: str) -> str:
    """The text with one letter dropped, doubled or swapped with the next, inside a longer word."""
    found = list(WORD.finditer(text))
    if not found:
        return text
    word = rng.choice(found)
    i = rng.randrange(word.start() + 1, word.end() - 2)
    middle = rng.choice(("", text[i] * 2, text[i + 1] + text[i]))
    return text[:i] + middle + text[i + 1 + (len(middle) == 2 and middle[0] != text[i]) :]


CLASSIC, TRAINING, HELD_OUT = Wording("classic"), Wording("training"), Wording("held_out")
VALIDATION, BLIND_WORDING = Wording("validation"), Wording("blind")
