"""exact: your own questions, each with the one text that answers it."""

from __future__ import annotations

from radixlm.evals.items import Grade, Item, Reply, Task, TaskOptions, fields_of, read_rows


def exact(options: TaskOptions) -> Task:
    """JSON lines of `question` (text or messages) and `answer` (text, or a list of right ones);
    `group` if there are several. Spaces at the ends do not count."""
    path = options.path("exact", "FILE.jsonl")
    rows = read_rows(path)
    items = []
    for i, (question, answer) in enumerate(fields_of(rows, path, "question", "answer")):
        right = [str(one).strip() for one in (answer if isinstance(answer, list) else [answer])]
        items.append(Item(str(i), question, right, str(rows[i].get("group") or "")))
    return Task(items, _grade, 256)


def _grade(item: Item, reply: Reply) -> Grade:
    found = reply.text.strip()
    return Grade(float(found in item.answer), found or None)
