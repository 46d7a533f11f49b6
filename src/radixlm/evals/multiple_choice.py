"""Questions with several answers to choose from: mmlu, gpqa, and files of choices."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.evals.items import Grade, Item, Reply, Task, TaskOptions, fields_of, read_rows

_LETTERS = "ABCDEFGHIJ"
_ANSWER = re.compile(r"(?i)answer\s*:\s*\**\(?([A-J])\b")
_FIRST = re.compile(r"\s*\(?([A-J])\b")
Question = tuple[str, Sequence[str], str, str]  # question, choices, letter, subject


def mmlu(options: TaskOptions) -> Task:
    """A CSV with the columns Question, A to D, Answer and Subject, JSON lines of `question`,
    `choices`, `answer` (letter or index) and `subject`, or the folder of the authors' archive with
    test/ and dev/ (whose questions are the examples)."""
    path = options.path("mmlu", "mmlu.csv or FOLDER with test/ and dev/")
    dev: dict[str, list[Question]] = {}
    if path.is_dir():
        questions = [q for file in sorted(path.glob("test/*_test.csv")) for q in _plain(file)]
        for file in sorted(path.glob("dev/*_dev.csv")):
            dev[_subject(file)] = _plain(file)
    else:
        questions = _with_headings(path)
    if options.group:
        questions = [q for q in questions if q[3] in options.group.split(",")]
    if not questions:
        raise ConfigError(f"--data-path {path}: no question (of --group) is there")
    num_shots = options.num_shots or 0
    if num_shots and any(len(dev.get(q[3], ())) < num_shots for q in questions):
        raise ConfigError("--num-shots: mmlu takes its examples from dev/ of the authors' folder")
    return _task(questions, options, dev, num_shots)


def gpqa(options: TaskOptions) -> Task:
    """The authors' CSV: Question, Correct Answer, Incorrect Answer 1 to 3. --seed mixes them."""
    path = options.path("gpqa", "gpqa_diamond.csv")
    names = ["Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    questions: list[Question] = []
    draw = random.Random(options.seed)
    for question, *choices in fields_of(read_rows(path), path, *names):
        order = draw.sample(range(4), 4)
        questions.append((question, [choices[i] for i in order], _LETTERS[order.index(0)], ""))
    return _task(questions, options, {}, 0)


def choices(options: TaskOptions) -> Task:
    """JSON lines of `context`, `choices` (texts that follow it) and `answer` (their index): the
    likeliest choice counts, as in lm-evaluation-harness's acc."""
    path = options.path("choices", "FILE.jsonl")
    rows = read_rows(path)
    items = []
    values = fields_of(rows, path, "context", "choices", "answer")
    for i, (context, found, answer) in enumerate(values):
        if not 0 <= int(answer) < len(found):
            raise ConfigError(f"{path}: line {i + 1}: answer {answer} is no index of the choices")
        group = str(rows[i].get("group") or "")
        items.append(Item(str(i), context, int(answer), group, choices=tuple(found)))
    return Task(items, grade_likeliest, is_chat=False)


def grade_likeliest(item: Item, reply: Reply) -> Grade:
    """Right if the choice of the largest log-probability is; `acc_norm`: by its length."""
    found = reply.likelihoods
    if not found:
        return Grade(0.0)
    best = max(range(len(found)), key=found.__getitem__)
    normed = max(range(len(found)), key=lambda i: found[i] / max(1, len(item.choices[i])))
    return Grade(float(best == item.answer), best, {"acc_norm": float(normed == item.answer)})


def _subject(path: Path) -> str:
    return path.stem.rpartition("_")[0]


def _plain(path: Path) -> list[Question]:
    """question, A, B, C, D, answer without headings."""
    found: list[Question] = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            if len(row) != 6:
                raise ConfigError(f"{path}: a line of {len(row)} columns, expected 6")
            found.append((row[0], row[1:5], row[5].strip(), _subject(path)))
    return found


def _with_headings(path: Path) -> list[Question]:
    rows = read_rows(path)
    if "Question" in rows[0]:
        names = ("Question", "A", "B", "C", "D", "Answer", "Subject")
        return [(q, four, a, s) for q, *four, a, s in fields_of(rows, path, *names)]
    values = fields_of(rows, path, "question", "choices", "answer")
    return [
        (q, c, a if isinstance(a, str) else _LETTERS[a], str(row.get("subject") or ""))
        for (q, c, a), row in zip(values, rows, strict=True)
    ]


def _task(
    questions: Sequence[Question],
    options: TaskOptions,
    dev: Mapping[str, Sequence[Question]],
    num_shots: int,
) -> Task:
    """Written answers ("Answer: B", chat), or with --method likelihood or examples the letter that
    follows "Answer:" (the form of the MMLU paper)."""
    by_likelihood = options.method == "likelihood"
    is_short = by_likelihood or num_shots > 0
    items = []
    for i, one in enumerate(questions):
        subject, listed = one[3], tuple(f" {letter}" for letter in _LETTERS[: len(one[1])])
        shots = tuple((_short(s), f" {s[2]}") for s in dev.get(subject, ())[:num_shots])
        about = f"about {subject.replace('_', ' ')}.\n\n"
        head = f"The following are multiple choice questions (with answers) {about}"
        first = head if subject and is_short else ""
        if shots:
            shots = ((first + shots[0][0], shots[0][1]), *shots[1:])
        text = _short(one) if is_short else _long(one)
        text = first + text if not shots else text
        answer: Any = _LETTERS.index(one[2]) if by_likelihood else one[2]
        kept = listed if by_likelihood else ()
        items.append(Item(str(i), text, answer, subject, shots, kept))
    if by_likelihood:
        return Task(items, grade_likeliest, is_chat=False)
    if is_short:
        return Task(items, _grade_first, 4, ("\n",), is_chat=False)
    return Task(items, _grade_letter, 2048)


def _short(one: Question) -> str:
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, one[1], strict=False))
    return f"{one[0]}\n{listed}\nAnswer:"


def _long(one: Question) -> str:
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip(_LETTERS, one[1], strict=False))
    last = _LETTERS[len(one[1]) - 1]
    return (
        f"{one[0]}\n\n{listed}\n\nThink step by step, then end with a line of the form "
        f"'Answer: X', where X is one of the letters A to {last}."
    )


def _grade_letter(item: Item, reply: Reply) -> Grade:
    found = _ANSWER.findall(reply.text)
    return (
        Grade(float(found[-1].upper() == item.answer), found[-1].upper()) if found else Grade(0.0)
    )


def _grade_first(item: Item, reply: Reply) -> Grade:
    found = _FIRST.match(reply.text) or _ANSWER.search(reply.text)
    return Grade(float(found[1].upper() == item.answer), found[1].upper()) if found else Grade(0.0)
