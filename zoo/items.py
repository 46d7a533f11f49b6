"""Write the held-out items that `radixlm eval bundled` asks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data import EVALUATIONS, evaluation
from evaluate import wire_message

FEW = {"passage": 10, "passage-long": 4}  # long items


def rows(num_items: int) -> Iterator[dict[str, Any]]:
    """Task, messages, tools, and the answer or the calls, of each item."""
    for task in EVALUATIONS:
        for seed in range(10 if task.startswith("tool-") else FEW.get(task, num_items)):
            item = evaluation(task, seed)
            want = item.answer()
            messages = [wire_message(m, i) for i, m in enumerate(item.prompt())]
            row: dict[str, Any] = {"task": task, "messages": messages}
            row |= {"tools": item.tools} if item.tools else {}
            calls = want.get("tool_calls")
            yield row | ({"calls": calls} if calls else {"answer": want["content"]})


def main() -> None:
    """One line an item."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(__file__).parents[1] / "src" / "radixlm" / "assets" / "evals"
    parser.add_argument("--out", type=Path, default=folder / "bundled.jsonl")
    parser.add_argument("--items", type=int, default=20)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for row in rows(args.items):
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
