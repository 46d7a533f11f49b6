"""The held-out items of the model that comes with the package (see zoo/README.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.evals.items import Grade, Item, Reply, Task, TaskOptions, read_rows

ITEMS = Path(__file__).parents[1] / "assets" / "evals" / "bundled.jsonl"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def bundled(options: TaskOptions) -> Task:
    """Lines of `task`, `messages`, and `answer` or `calls`; --group: some tasks only."""
    path = ITEMS if options.data_path is None else options.path("bundled", "FILE.jsonl")
    rows = read_rows(path)
    names = list(dict.fromkeys(row["task"] for row in rows))
    wanted = options.group.split(",") if options.group else names
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(f"--group {unknown[0]}: one of {', '.join(names)}")
    counts: dict[str, int] = {}
    items = []
    for row in rows:
        task = row["task"]
        number = counts[task] = counts.get(task, -1) + 1
        if task not in wanted:
            continue
        thinks = task.endswith("-think")
        fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks}}
        if row.get("tools"):
            fields["tools"] = row["tools"]
        answer = {"text": row.get("answer"), "calls": row.get("calls") or []}
        items.append(Item(f"{task}-{number}", row["messages"], answer, task, fields=fields))
    return Task(items, _grade, 220)


def _grade(item: Item, reply: Reply) -> Grade:
    """The exact text, the same JSON, or the same calls."""
    text = reply.text.split("</think>")[-1].strip()
    calls = [*_written_calls(text), *reply.calls]
    want = item.answer["calls"]
    if item.group in ("tool-none", "tool-missing"):
        return Grade(float(not calls and "<tool_call>" not in text), calls or text)
    if want:
        return Grade(float(calls == want), calls or None)
    if item.group == "json":
        try:
            found = json.loads(text)
        except ValueError:
            return Grade(0.0)
        return Grade(float(found == json.loads(item.answer["text"])), found)
    return Grade(float(text == item.answer["text"] and not calls), text or None)


def _written_calls(text: str) -> list[Any]:
    """Calls in the Hermes form that the server left in the text; None is one that is not JSON."""
    calls: list[Any] = []
    for block in _CALL.findall(text):
        try:
            calls.append(json.loads(block))
        except ValueError:
            calls.append(None)
    return calls
