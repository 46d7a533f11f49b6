"""ifeval: instructions whose following a program can check (Zhou et al. 2023, arXiv 2311.07911).

An item has one to three instructions. Strict looks at the answer as it is; loose forgives a first
or last line and asterisks. Of the 25 kinds `language:response_language` is not checked: its items
are left out, and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.evals.items import Grade, Item, Reply, Task, TaskOptions, fields_of, read_rows

Values = Mapping[str, Any]
_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"[^.!?\n]*[^.!?\s][^.!?\n]*[.!?]*")
_NOT_CHECKED = "language:response_language"


def _relation(count: int, values: Values, name: str, relation: str = "relation") -> bool:
    """ "at least" or "less than" so many."""
    limit = int(values[name])
    return count >= limit if values.get(relation) == "at least" else count < limit


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _paragraphs(text: str, rule: str) -> list[str]:
    return [part.strip() for part in re.split(rule, text)]


def _num_paragraphs(text: str, values: Values) -> bool:
    parts = _paragraphs(text, r"\s?\*\*\*\s?")
    middle_is_full = all(parts[1:-1])
    return middle_is_full and sum(map(bool, parts)) == int(values["num_paragraphs"])


def _nth_first_word(text: str, values: Values) -> bool:
    parts = [part for part in _paragraphs(text, r"\n\n") if part]
    nth = int(values["nth_paragraph"])
    if len(parts) != int(values["num_paragraphs"]) or nth > len(parts):
        return False
    word = parts[nth - 1].split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", word)[0] == str(values["first_word"]).lower()


def _sections(text: str, values: Values) -> bool:
    mark = re.escape(str(values["section_spliter"]))
    return len(re.findall(rf"\s?{mark}\s?\d+\s?", text)) >= int(values["num_sections"])


def _highlights(text: str, values: Values) -> bool:
    single = [part for part in re.findall(r"\*[^\n\*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", text) if part.strip("*").strip()]
    return len(single) + len(double) >= int(values["num_highlights"])


def _json(text: str, _: Values) -> bool:
    body = re.sub(r"^```(?:json|JSON|Json)?|```$", "", text.strip()).strip()
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _keyword(word: str, text: str) -> int:
    return len(re.findall(word, text, re.IGNORECASE))


def _two_responses(text: str, _: Values) -> bool:
    parts = [part.strip() for part in text.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def _postscript(text: str, values: Values) -> bool:
    mark = str(values["postscript_marker"])
    rule = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(mark, re.escape(mark))
    return re.search(rule, text, re.IGNORECASE) is not None


def _letters(text: str, values: Values) -> bool:
    count = text.lower().count(str(values["letter"]).lower())
    return _relation(count, values, "let_frequency", "let_relation")


def _capital_words(text: str, values: Values) -> bool:
    count = sum(word.isupper() for word in re.findall(r"[\w'-]+", text))
    return _relation(count, values, "capital_frequency", "capital_relation")


CHECKS: dict[str, Callable[[str, Values], bool]] = {
    "keywords:existence": lambda t, v: all(_keyword(word, t) for word in v["keywords"]),
    "keywords:frequency": lambda t, v: _relation(_keyword(v["keyword"], t), v, "frequency"),
    "keywords:forbidden_words": lambda t, v: (
        not any(_keyword(rf"\b{word}\b", t) for word in v["forbidden_words"])
    ),
    "keywords:letter_frequency": _letters,
    "length_constraints:number_sentences": lambda t, v: _relation(
        len(_SENTENCE.findall(t)), v, "num_sentences"
    ),
    "length_constraints:number_paragraphs": _num_paragraphs,
    "length_constraints:number_words": lambda t, v: _relation(len(_words(t)), v, "num_words"),
    "length_constraints:nth_paragraph_first_word": _nth_first_word,
    "detectable_content:number_placeholders": lambda t, v: (
        len(re.findall(r"\[.*?\]", t)) >= int(v["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, v: (
        len(re.findall(r"^\s*(?:\*[^\*].*|-.*)$", t, re.MULTILINE)) == int(v["num_bullets"])
    ),
    "detectable_format:constrained_response": lambda t, _: any(
        f"My answer is {word}." in t for word in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda t, _: any(
        part.strip("<> ").strip() for part in re.findall(r"<<[^\n]+>>", t)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, v: (
        t.strip().lower().startswith(str(v["prompt_to_repeat"]).strip().lower())
    ),
    "startend:end_checker": lambda t, v: (
        t.strip().strip('"').lower().endswith(str(v["end_phrase"]).strip().lower())
    ),
    "startend:quotation": lambda t, _: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda t, _: t.isupper(),
    "change_case:english_lowercase": lambda t, _: t.islower(),
    "punctuation:no_comma": lambda t, _: "," not in t,
}


def ifeval(options: TaskOptions) -> Task:
    """JSON lines of `prompt`, `instruction_id_list` and `kwargs`."""
    path = options.path("ifeval", "input_data.jsonl")
    items, num_left_out = [], 0
    values = fields_of(read_rows(path), path, "prompt", "instruction_id_list", "kwargs")
    for i, (prompt, names, arguments) in enumerate(values):
        if unknown := [name for name in names if name not in CHECKS and name != _NOT_CHECKED]:
            raise ConfigError(f"{path}: line {i + 1}: unknown instruction {unknown[0]!r}")
        if _NOT_CHECKED in names:
            num_left_out += 1
            continue
        checks = tuple(zip(names, arguments, strict=True))
        items.append(Item(str(i), prompt, checks, group=names[0].partition(":")[0]))
    notes = (f"{num_left_out} items of {_NOT_CHECKED} are left out",) if num_left_out else ()
    return Task(items, _grade, 1280, notes=notes)


def _loosened(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for some in (lines, lines[1:], lines[:-1], lines[1:-1]):
        whole = "\n".join(some).strip()
        yield whole
        yield whole.replace("*", "")


def followed(text: str, name: str, values: Values) -> bool:
    """Whether an answer follows one instruction; an empty one follows none."""
    return bool(text.strip()) and bool(CHECKS[name](text, values))


def _grade(item: Item, reply: Reply) -> Grade:
    strict = [followed(reply.text, name, values) for name, values in item.answer]
    loose = [
        any(followed(text, name, values) for text in _loosened(reply.text))
        for name, values in item.answer
    ]
    found = [name for (name, _), is_ok in zip(item.answer, strict, strict=True) if is_ok]
    more = {
        "instructions_strict": sum(strict) / len(strict),
        "prompt_loose": float(all(loose)),
        "instructions_loose": sum(loose) / len(loose),
    }
    return Grade(float(all(strict)), found, more)
