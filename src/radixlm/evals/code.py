"""humaneval: functions that a model writes, run against the authors' tests."""

from __future__ import annotations

import re

from radixlm.base.errors import ConfigError
from radixlm.evals.items import Grade, Item, Reply, Task, TaskOptions, fields_of, read_rows
from radixlm.evals.sandbox import run

_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")
_REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n"


def humaneval(options: TaskOptions) -> Task:
    """JSON lines (or .jsonl.gz) of `task_id`, `prompt`, `entry_point` and `test`."""
    if not options.allow_code_execution:
        raise ConfigError(
            "humaneval runs programs that the model writes, on this machine: add "
            "--allow-code-execution (they run in a process with limits and without network, which "
            "is no full sandbox; use a container for a model that you do not trust)"
        )
    path = options.path("humaneval", "HumanEval.jsonl.gz")
    items = []
    names = ("task_id", "prompt", "entry_point", "test")
    for name, prompt, function, test in fields_of(read_rows(path), path, *names):
        question = _REQUEST + f"```python\n{prompt.rstrip()}\n```"
        answer = {"prompt": prompt, "test": test, "function": function}
        items.append(Item(str(name), question, answer, completion=prompt))
    limit_s = options.code_timeout_s

    def grade(item: Item, reply: Reply) -> Grade:
        """Run the program; the score is 1 if the tests pass."""
        made = program(item, reply.text)
        ended = run(made, limit_s)
        return Grade(float(ended.is_ok), made if not ended.error else f"{ended.error}\n{made}",
                     {"had_network": float(ended.has_network)})  # fmt: skip

    return Task(items, grade, 1024, _STOP)


def program(item: Item, text: str) -> str:
    """The answer behind the prompt's own beginning, and the tests: a whole function in a code
    block replaces the prompt's, anything else continues it."""
    want = item.answer
    prompt, head = want["prompt"], f"def {want['function']}"
    blocks = _BLOCK.findall(text)
    code = next((block for block in blocks if head in block), blocks[0] if blocks else text)
    begin = prompt.partition(head)[0] if head in code else prompt
    return f"{begin}{code}\n\n{want['test']}\n\ncheck({want['function']})\n"
