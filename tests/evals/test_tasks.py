"""Each task: the published format is read, the prompt has its parts, answers are graded."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.evals.ask import as_messages, as_text
from radixlm.evals.instructions import CHECKS, followed
from radixlm.evals.items import Item, Reply, Task, TaskOptions
from radixlm.evals.tasks import TASKS, load_task


def score(task: Task, number: int, text: str) -> float:
    return task.grade(task.items[number], Reply(text=text)).score


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def table(path: Path, rows: list[list[str]]) -> str:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def test_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": f"Q{i}?", "answer": f"So.\n#### {1000 * i:,}"} for i in range(4)]
    path = lines(tmp_path / "test.jsonl", rows)
    task = load_task("gsm8k", TaskOptions(data_path=path, num_shots=2))
    assert [item.answer for item in task.items] == [2000, 3000]  # examples are not asked
    begin = "Question: Q0?\nAnswer: So.\n#### 0\n\nQuestion: Q1?"
    assert as_text(task.items[0]).startswith(begin)
    assert as_text(task.items[0]).endswith("\n\nQuestion: Q2?\nAnswer:")
    turns = as_messages(task.items[0], True, "Be brief.")
    assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * 2, "user"]
    (single,) = as_messages(task.items[0], False, None)
    assert single["content"] == as_text(task.items[0])
    assert score(task, 0, "first 5, so 2,000.") == 1.0 and score(task, 0, "2000 or 7") == 0.0
    assert task.grade(task.items[0], Reply(text="none")).found is None
    other = lines(tmp_path / "train.jsonl", rows[3:])
    task = load_task("gsm8k", TaskOptions(data_path=path, shots_path=other, num_shots=1))
    assert len(task.items) == 4 and "#### 3,000" in as_text(task.items[0])
    with pytest.raises(ConfigError, match="too few lines"):
        load_task("gsm8k", TaskOptions(data_path=path))


def test_mgsm(tmp_path: Path) -> None:
    for name in ("de", "en"):
        (tmp_path / f"mgsm_{name}.tsv").write_text("Wie viel?\t1,200\nUnd?\t7\n")
    task = load_task("mgsm", TaskOptions(data_path=str(tmp_path)))
    assert [item.group for item in task.items] == ["de", "de", "en", "en"]
    assert score(task, 0, "Rechnung 5.\nAntwort: 1200.00") == 1.0
    assert score(task, 0, "Answer: 1200") == 0.0 and score(task, 2, "Answer: 1,200.") == 1.0
    task = load_task("mgsm", TaskOptions(data_path=str(tmp_path / "mgsm_de.tsv")))
    assert len(task.items) == 2
    with pytest.raises(ConfigError, match="--language xx"):
        load_task("mgsm", TaskOptions(data_path=str(tmp_path), language="xx"))


def test_mmlu_in_its_three_formats(tmp_path: Path) -> None:
    four = ["one", "two", "three", "four"]
    heads = ["", "Question", "A", "B", "C", "D", "Answer", "Subject"]
    path = table(tmp_path / "mmlu.csv", [heads, ["0", "Which?", *four, "B", "law"]])
    task = load_task("mmlu", TaskOptions(data_path=path))
    assert "B) two" in str(task.items[0].question) and task.is_chat
    assert score(task, 0, "Hm. Answer: A? No.\n**Answer: B**") == 1.0
    assert score(task, 0, "answer: c") == 0.0 and score(task, 0, "B") == 0.0
    rows = [{"question": "Which?", "choices": four, "answer": 1, "subject": "law"}]
    path = lines(tmp_path / "mmlu.jsonl", rows)
    task = load_task("mmlu", TaskOptions(data_path=path, method="likelihood"))
    assert task.items[0].choices == (" A", " B", " C", " D") and not task.is_chat
    likely = Reply(likelihoods=[-2.0, -1.0, -3.0, -4.0])
    assert task.grade(task.items[0], likely).score == 1.0
    table(tmp_path / "test" / "high_school_law_test.csv", [["Which?", *four, "B"]])
    table(tmp_path / "dev" / "high_school_law_dev.csv", [["Who?", *four, "D"]])
    task = load_task("mmlu", TaskOptions(data_path=str(tmp_path), num_shots=1))
    text = as_text(task.items[0])
    about = "The following are multiple choice questions (with answers) about high school law.\n\n"
    assert text == f"{about}Who?\nA. one\nB. two\nC. three\nD. four\nAnswer: D\n\n" + (
        "Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    )
    assert score(task, 0, " B") == 1.0 and score(task, 0, " A") == 0.0
    with pytest.raises(ConfigError, match="dev/"):
        load_task("mmlu", TaskOptions(data_path=str(tmp_path), num_shots=2))


def test_gpqa_mixes_by_the_seed(tmp_path: Path) -> None:
    heads = ["Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    path = table(tmp_path / "gpqa.csv", [heads, *[["Why?", "yes", "a", "b", "c"]] * 8])
    task = load_task("gpqa", TaskOptions(data_path=path))
    letters = {item.answer for item in task.items}
    assert len(letters) > 1
    for item in task.items:
        assert f"{item.answer}) yes" in str(item.question)


def test_choices_take_the_likeliest(tmp_path: Path) -> None:
    row = {"context": "The sky is", "choices": [" blue", " very old and red"], "answer": 0}
    task = load_task("choices", TaskOptions(data_path=lines(tmp_path / "c.jsonl", [row])))
    grade = task.grade(task.items[0], Reply(likelihoods=[-4.0, -5.0]))
    assert grade.score == 1.0 and grade.more == {"acc_norm": 0.0}


def test_exact_takes_a_list_of_right_answers(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": 2}, {"question": "Hi?", "answer": ["Hello", "Hi"]}]
    task = load_task("exact", TaskOptions(data_path=lines(tmp_path / "e.jsonl", rows)))
    assert score(task, 0, " 2\n") == score(task, 1, "Hi") == 1.0 and score(task, 1, "hi") == 0.0


PROBLEM = {
    "task_id": "T/0",
    "prompt": 'import math\n\n\ndef half(x):\n    """Half of x."""\n',
    "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert math.pi\n",
}


def test_humaneval_runs_the_answer(tmp_path: Path) -> None:
    path = lines(tmp_path / "HumanEval.jsonl.gz", [PROBLEM])
    with pytest.raises(ConfigError, match="--allow-code-execution"):
        load_task("humaneval", TaskOptions(data_path=path))
    task = load_task("humaneval", TaskOptions(data_path=path, allow_code_execution=True))
    assert as_text(task.items[0]) == PROBLEM["prompt"]
    assert score(task, 0, "    return x / 2\n") == 1.0
    assert score(task, 0, "Here:\n```python\ndef half(x):\n    return x // 2\n```") == 1.0
    assert score(task, 0, "    return x / 3\n") == 0.0
    assert score(task, 0, "    raise SystemExit(0)\n") == 0.0


FOLLOWED: list[tuple[str, dict[str, Any], str, str]] = [  # kind, values, follows, does not
    ("keywords:existence", {"keywords": ["red", "sea"]}, "The Red sea", "red"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a a", "a b"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a cat"),
    ("keywords:letter_frequency",
     {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "let", "Eve"),
    ("length_constraints:number_sentences",
     {"num_sentences": 2, "relation": "at least"}, "One. Two!", "One only."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words",
     {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\nSo, b", "so a\n\nb"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP. S. b", "tips help"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "yes"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "a *b* c", "a * b"),
    ("detectable_format:multiple_sections",
     {"section_spliter": "Part", "num_sections": 2}, "Part 1\nPart 2", "Part 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Here", "Here"),
    ("startend:end_checker", {"end_phrase": "The end."}, "a. the end.", "The end. b"),
    ("startend:quotation", {}, '"a"', '"a'),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 1, "capital_relation": "at least"}, "GO on", "go on"),
    ("change_case:english_capital", {}, "ALL CAPS 1", "Caps"),
    ("change_case:english_lowercase", {}, "all low 1", "Low"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "right", "wrong"), FOLLOWED)
def test_instruction(kind: str, values: dict[str, Any], right: str, wrong: str) -> None:
    assert followed(right, kind, values) and not followed(wrong, kind, values)
    assert not followed(" ", kind, values)


def test_ifeval(tmp_path: Path) -> None:
    assert set(CHECKS) == {kind for kind, *_ in FOLLOWED}
    kinds = ["punctuation:no_comma", "startend:quotation"]
    rows = [
        {"prompt": "Go.", "instruction_id_list": kinds, "kwargs": [{}, {}]},
        {
            "prompt": "Los.",
            "instruction_id_list": ["language:response_language"],
            "kwargs": [{"language": "de"}],
        },
    ]
    task = load_task("ifeval", TaskOptions(data_path=lines(tmp_path / "i.jsonl", rows)))
    assert len(task.items) == 1 and "1 items of language" in task.notes[0]
    grade = task.grade(task.items[0], Reply(text='Sure, here:\n"fine"'))
    assert grade.score == 0.0  # loose drops the first line
    assert grade.more == {
        "instructions_strict": 0.0, "prompt_loose": 1.0, "instructions_loose": 1.0
    }  # fmt: skip
    rows[0]["instruction_id_list"] = ["made:up"]
    with pytest.raises(ConfigError, match="line 1: unknown instruction 'made:up'"):
        load_task("ifeval", TaskOptions(data_path=lines(tmp_path / "i.jsonl", rows)))


def test_needle(tmp_path: Path) -> None:
    options = TaskOptions(lengths=(40, 80), depths=(0, 100), num_needles=2, seed=5)
    task = load_task("needle", options)
    assert len(task.items) == 8 and task.items == load_task("needle", options).items
    for item in task.items:
        text, _, asked = str(item.question).rpartition("\n\n")
        assert f"is {item.answer}." in text and "What is the code" in asked
        assert text.startswith("The code") == ("depth 0%" in item.group)
        assert score(task, 0, task.items[0].answer) == 1.0
    (tmp_path / "text.txt").write_text("One two three. Four five six! ")
    task = load_task("needle", TaskOptions(lengths=(30,), data_path=str(tmp_path / "text.txt")))
    assert str(task.items[0].question).count("three") >= 4


def test_several_needles() -> None:
    task = load_task("multi-needle", TaskOptions(lengths=(40,), num_needles=3))
    item = task.items[0]
    assert all(f"is {code}." in str(item.question) for code in item.answer)
    assert str(item.question).startswith("The code")
    assert score(task, 0, f"They are {item.answer[2]} and {item.answer[0]}.") == 2 / 3
    with pytest.raises(ConfigError, match="--num-needles 13: at most 12 in a text"):
        load_task("multi-needle", TaskOptions(num_needles=13))


def test_variable_tracking() -> None:
    task = load_task("variable-tracking", TaskOptions(lengths=(40, 60), num_needles=3))
    item = task.items[-1]
    a, b, c = item.answer
    text, _, asked = str(item.question).rpartition("\n\n")
    value = re.findall(r"\d{5}", asked)[0]
    chain = [(a, value), (b, f"VAR {a}"), (c, f"VAR {b}")]
    assert re.findall(r"VAR (\w+) = (.*?)\.", text) == chain
    assert score(task, len(task.items) - 1, f"{a}, {b}") == 2 / 3


LONG = (  # dataset, answer, right, its score, worse, its score
    ("hotpotqa", "the Red Sea", "Red sea.", 1.0, "red hill", 0.5),
    ("gov_report", "a b c d", "a b c d", 1.0, "a x c", 4 / 7),
    ("trec", "Food", "It is Food", 1.0, "City", 0.0),
    ("passage_count", "7", "7", 1.0, "7 or 8", 0.5),
    ("passage_retrieval_en", "Paragraph 3", "Paragraph 3", 1.0, "none", 0.0),
    ("lcc", "x = 1", "x = 1\ny = 2", 1.0, "# note\n", 0.0),
)


@pytest.mark.parametrize(("dataset", "answer", "right", "one", "worse", "less"), LONG)
def test_longbench(
    dataset: str, answer: str, right: str, one: float, worse: str, less: float, tmp_path: Path
) -> None:
    row = {"context": "Long.", "input": "What?", "answers": ["none of it", answer]}
    row |= {"dataset": dataset, "all_classes": ["Food", "City"]}
    options = TaskOptions(data_path=lines(tmp_path / "l.jsonl", [row]), prompt_template="{input}")
    task = load_task("longbench", options)
    assert task.items[0].question == "What?"
    if dataset == "passage_retrieval_en":
        row["answers"] = [answer]
    assert score(task, 0, right) == pytest.approx(one)
    assert score(task, 0, worse) == pytest.approx(less)


def test_longbench_v2(tmp_path: Path) -> None:
    row = {"question": "What?", "context": "Long.", "answer": "C", "length": "short"}
    row |= {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    path = tmp_path / "v2.json"
    path.write_text(json.dumps([row]))
    task = load_task("longbench", TaskOptions(data_path=str(path)))
    assert "(C) c" in str(task.items[0].question) and score(task, 0, "The answer is (C)") == 1.0
    assert score(task, 0, "The answer is (C), so the answer is a letter.") == 1.0


def test_bundled_grades_calls_json_and_text() -> None:
    task = load_task("bundled", TaskOptions(group="add2,tool-one,tool-none,json"))
    of = {item.group: item for item in reversed(task.items)}
    assert set(of) == {"add2", "tool-one", "tool-none", "json"}

    def grade(item: Item, **reply: Any) -> float:
        return task.grade(item, Reply(**reply)).score

    assert grade(of["add2"], text=f"<think>\nso\n</think>\n\n{of['add2'].answer['text']}") == 1.0
    calls = of["tool-one"].answer["calls"]
    assert grade(of["tool-one"], calls=calls) == 1.0 and grade(of["tool-one"], text="no") == 0.0
    written = f"<tool_call>\n{json.dumps(calls[0])}\n</tool_call>"
    assert grade(of["tool-one"], text=written) == float(len(calls) == 1)
    assert grade(of["tool-none"], text="No.") == 1.0 and grade(of["tool-none"], calls=calls) == 0.0
    spaced = json.dumps(json.loads(of["json"].answer["text"]), indent=3)
    assert grade(of["json"], text=spaced) == 1.0 and grade(of["json"], text="{") == 0.0
    with pytest.raises(ConfigError, match="--group add9: one of add2"):
        load_task("bundled", TaskOptions(group="add9"))


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    made = {"bundled", "needle", "multi-needle", "variable-tracking", "humaneval"}
    for name in set(TASKS) - made:
        with pytest.raises(ConfigError, match=f"{name} needs --data-path"):
            load_task(name, TaskOptions())
    with pytest.raises(ConfigError, match="unknown task 'gsm9k'"):
        load_task("gsm9k", TaskOptions())
    with pytest.raises(ConfigError, match="--num-shots: needle does not use it"):
        load_task("needle", TaskOptions(num_shots=3))
    with pytest.raises(ConfigError, match="--allow-code-execution: exact does not"):
        load_task("exact", TaskOptions(allow_code_execution=True))
    path = lines(tmp_path / "a.jsonl", [{"question": "Q"}])
    with pytest.raises(ConfigError, match="line 1 has no 'answer'; it has"):
        load_task("gsm8k", TaskOptions(data_path=path))
    (tmp_path / "b.jsonl").write_text("no json")
    with pytest.raises(ConfigError, match="not JSON lines"):
        load_task("gsm8k", TaskOptions(data_path=str(tmp_path / "b.jsonl")))
    with pytest.raises(ConfigError, match="no such file"):
        load_task("gsm8k", TaskOptions(data_path=str(tmp_path / "c.jsonl")))
