"""Records: an item asks, a reply answers, a grade says how right that is."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `question`: text, or the messages of a conversation. `shots`: (question,
    answer) of the examples before it. `choices`: scored by their likelihood, nothing is written.
    `completion`: the text to continue where that differs from the question. `fields`: more fields
    of the request."""

    id: str
    question: str | list[dict[str, Any]]
    answer: Any
    group: str = ""
    shots: tuple[tuple[str, str], ...] = ()
    choices: tuple[str, ...] = ()
    completion: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Reply:
    """A model's answer. `likelihoods`: log-probability of each choice. `error`: why there is no
    answer."""

    text: str = ""
    calls: list[Any] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    latency_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """`score`: 0 to 1. `found`: the answer read from the text, None if there is none. `more`:
    further scores by name."""

    score: float
    found: Any = None
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """Items and how they are graded. `is_chat`: how the items are asked unless the user says."""

    items: Sequence[Item]
    grade: Callable[[Item, Reply], Grade]
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    is_chat: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The flags that tasks read; field names equal the flags."""

    data_path: str | None = None
    shots_path: str | None = None
    num_shots: int | None = None
    seed: int = 0
    method: str = "generate"
    language: str | None = None
    group: str | None = None
    prompt_template: str | None = None
    lengths: Sequence[int] = (500, 1000, 2000)
    depths: Sequence[int] = (0, 25, 50, 75, 100)
    num_needles: int = 4
    allow_code_execution: bool = False
    code_timeout_s: float = 3.0

    def path(self, task: str, form: str) -> Path:
        """--data-path. ConfigError without it; `form` says what to give."""
        if self.data_path is None:
            raise ConfigError(f"{task} needs --data-path {form} (nothing is downloaded)")
        return existing(self.data_path, "--data-path")


def existing(path: str, flag: str) -> Path:
    """The path, expanded. ConfigError if nothing is there."""
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"{flag} {path}: no such file or folder")
    return found


def read_text(path: Path) -> str:
    """A text in UTF-8, unpacked if its name ends in .gz. ConfigError if it cannot be read."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file or of a JSON array, or the lines of a CSV with headings."""
    text = read_text(path)
    rows: list[dict[str, Any]]
    if path.name.removesuffix(".gz").endswith(".csv"):
        return list(csv.DictReader(text.splitlines(keepends=True)))
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON lines ({error})") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: expected lines of JSON objects")
    return rows


def fields_of(rows: Sequence[Mapping[str, Any]], path: Path, *names: str) -> Iterator[list[Any]]:
    """The values of ``names`` in each row. ConfigError that names the line that lacks one."""
    for number, row in enumerate(rows, 1):
        missing = [name for name in names if row.get(name) is None]
        if missing:
            raise ConfigError(f"{path}: line {number} has no {missing[0]!r}; it has {sorted(row)}")
        yield [row[name] for name in names]
