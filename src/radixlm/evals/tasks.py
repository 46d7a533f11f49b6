"""The tasks by name; a task's module is imported when it is used."""

from __future__ import annotations

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.nearest import suggestion
from radixlm.evals.items import Task, TaskOptions

# name -> ("module:function" from options to a Task, one line of help)
TASKS: dict[str, tuple[str, str]] = {
    "bundled": ("radixlm.evals.bundled:bundled", "the bundled model's own held-out items"),
    "gsm8k": ("radixlm.evals.grade_school:gsm8k", "grade-school mathematics, few-shot"),
    "mgsm": ("radixlm.evals.grade_school:mgsm", "the same in eleven languages"),
    "mmlu": ("radixlm.evals.multiple_choice:mmlu", "exam questions of 57 subjects"),
    "gpqa": ("radixlm.evals.multiple_choice:gpqa", "questions of graduate level"),
    "choices": ("radixlm.evals.multiple_choice:choices", "the likeliest of some continuations"),
    "exact": ("radixlm.evals.exact:exact", "your own questions, each with its answer"),
    "humaneval": ("radixlm.evals.code:humaneval", "Python functions, run against tests"),
    "ifeval": ("radixlm.evals.instructions:ifeval", "instructions that a program can check"),
    "needle": ("radixlm.evals.long_context:needle", "a number hidden in a long text"),
    "multi-needle": ("radixlm.evals.long_context:multi_needle", "several numbers in a long text"),
    "variable-tracking": (
        "radixlm.evals.long_context:variable_tracking",
        "variables of one value in a long text",
    ),
    "longbench": ("radixlm.evals.long_context:longbench", "questions about long texts"),
}
# option -> the tasks that read it
_ONLY = {
    "num_shots": ("gsm8k", "mmlu"),
    "shots_path": ("gsm8k",),
    "method": ("mmlu", "gpqa"),
    "language": ("mgsm",),
    "group": ("mmlu", "bundled"),
    "prompt_template": ("longbench",),
    **dict.fromkeys(("lengths", "num_needles"), ("needle", "multi-needle", "variable-tracking")),
    "depths": ("needle",),
    **dict.fromkeys(("allow_code_execution", "code_timeout_s"), ("humaneval",)),
}


def load_task(name: str, options: TaskOptions) -> Task:
    """The task of this name. ConfigError for an unknown name, an option that is not for this task,
    or a file that cannot be read."""
    if name not in TASKS:
        near = suggestion(name, TASKS)
        raise ConfigError(f"unknown task {name!r}{near}; one of {', '.join(TASKS)}")
    for option, tasks in _ONLY.items():
        if name not in tasks and getattr(options, option) != getattr(TaskOptions(), option):
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{flag}: {name} does not use it; leave it out ({', '.join(tasks)})")
    task: Task = load(TASKS[name][0])(options)
    if not task.items:
        raise ConfigError(f"{name}: no item is left to ask")
    return task
