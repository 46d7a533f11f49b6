"""Mathematics with an integer or short answer: gsm8k and mgsm."""

from __future__ import annotations

import re
from pathlib import Path

from radixlm.base.errors import ConfigError
from radixlm.evals.items import (
    Grade,
    Item,
    Reply,
    Task,
    TaskOptions,
    existing,
    fields_of,
    read_rows,
    read_text,
)

_STOP = ("Question", "Assistant:", "<|separator|>")
_INTEGER, _DECIMAL = re.compile(r"\d+"), re.compile(r"\d+\.?\d*")
# language -> (request, word before the answer)
LANGUAGES = {
    "bn": ("ধাপে ধাপে সমাধান করুন। শেষ লাইনে লিখুন", "উত্তর"),
    "de": ("Löse die Aufgabe Schritt für Schritt. Schreibe in die letzte Zeile", "Antwort"),
    "en": ("Solve the problem step by step. Write in the last line", "Answer"),
    "es": ("Resuelve el problema paso a paso. Escribe en la última línea", "Respuesta"),
    "fr": ("Résous le problème étape par étape. Écris sur la dernière ligne", "Réponse"),
    "ja": ("段階的に解いてください。最後の行に次のように書いてください", "答え"),
    "ru": ("Реши задачу шаг за шагом. В последней строке напиши", "Ответ"),
    "sw": ("Tatua swali hatua kwa hatua. Katika mstari wa mwisho andika", "Jibu"),
    "te": ("దశలవారీగా పరిష్కరించండి. చివరి వరుసలో ఇలా రాయండి", "సమాధానం"),
    "th": ("แก้โจทย์ทีละขั้นตอน ในบรรทัดสุดท้ายให้เขียน", "คำตอบ"),
    "zh": ("请逐步解题。在最后一行写", "答案"),
}


def last_integer(text: str) -> int | None:
    """The last run of digits, thousands separators removed; signs and fractions are not read."""
    found = _INTEGER.findall(text.replace(",", ""))
    return int(found[-1]) if found else None


def gsm8k(options: TaskOptions) -> Task:
    """JSON lines of `question` and `answer`, which ends in "#### NUMBER". The first `--num-shots`
    (5) are the examples and not asked, unless --shots-path has them (the training file)."""
    path = options.path("gsm8k", "test.jsonl")
    rows = list(fields_of(read_rows(path), path, "question", "answer"))
    num_shots = 5 if options.num_shots is None else options.num_shots
    examples = rows[:num_shots]
    if options.shots_path:
        other = existing(options.shots_path, "--shots-path")
        examples = list(fields_of(read_rows(other), other, "question", "answer"))[:num_shots]
    else:
        rows = rows[num_shots:]
    shots = tuple((_asked(question), f" {answer}") for question, answer in examples)
    if not rows or len(shots) < num_shots:
        raise ConfigError(f"--num-shots {num_shots}: {path} has too few lines; use less")
    items = [
        Item(str(i), _asked(question), last_integer(answer), shots=shots)
        for i, (question, answer) in enumerate(rows)
    ]
    if bad := next((item.id for item in items if item.answer is None), None):
        raise ConfigError(f"{path}: the answer of question {bad} has no number")
    return Task(items, _grade_integer, 512, _STOP, is_chat=False)


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _grade_integer(item: Item, reply: Reply) -> Grade:
    found = last_integer(reply.text)
    return Grade(float(found == item.answer), found)


def mgsm(options: TaskOptions) -> Task:
    """Lines of question, tab, answer. --data-path: a folder of mgsm_LANGUAGE.tsv, or one file."""
    path = options.path("mgsm", "FOLDER of mgsm_LANGUAGE.tsv")
    wanted = options.language.split(",") if options.language else None
    if unknown := [name for name in wanted or () if name not in LANGUAGES]:
        raise ConfigError(f"--language {unknown[0]}: one of {', '.join(LANGUAGES)}")
    files = {path.stem.removeprefix("mgsm_"): path}
    if path.is_dir():
        files = {name: path / f"mgsm_{name}.tsv" for name in wanted or LANGUAGES}
        files = {name: file for name, file in files.items() if wanted or file.is_file()}
    elif wanted:
        files = {wanted[0]: path}
    items = [item for name, file in files.items() for item in _one_language(name, file)]
    if not items:
        raise ConfigError(f"--data-path {path}: no mgsm_LANGUAGE.tsv with questions is there")
    return Task(items, _grade_prefixed, 1024)


def _one_language(name: str, path: Path) -> list[Item]:
    if name not in LANGUAGES:
        raise ConfigError(f"{path}: give --language, one of {', '.join(LANGUAGES)}")
    request, word = LANGUAGES[name]
    items = []
    for number, line in enumerate(read_text(path).splitlines()):
        question, tab, answer = line.strip().rpartition("\t")
        if not tab:
            raise ConfigError(f"{path}: line {number + 1} has no tab between question and answer")
        prompt = f'{request} "{word}: 42".\n\n{question}'
        items.append(Item(f"{name}-{number}", prompt, answer.replace(",", ""), group=name))
    return items


def _grade_prefixed(item: Item, reply: Reply) -> Grade:
    _, word = LANGUAGES[item.group]
    _, found_word, behind = reply.text.rpartition(word)
    numbers = _DECIMAL.findall(behind.replace(",", "")) if found_word else []
    if not numbers:
        return Grade(0.0)
    found = numbers[-1].rstrip(".")
    found = found.rstrip("0").rstrip(".") if "." in found else found
    return Grade(float(found == item.answer), found)
