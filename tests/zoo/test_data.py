"""The curriculum's answers are exact, and bundled models load."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import chat
import data
import evaluate
import jinja2
import passages
import pytest
import tasks
import tools
from batches import bucket_packer
from tokenizers import Tokenizer
from wording import CLASSIC, TRAINING

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "src/radixlm/assets/radix-tiny"
NEEDS_ASSETS = pytest.mark.skipif(
    not (ASSETS / "tokenizer.json").exists(), reason="the bundled model is not built"
)


def items(task: tasks.Task, num: int = 200) -> list[tasks.Item]:
    rng = Random(5)
    return [task(rng) for _ in range(num)]


@pytest.mark.parametrize(("task", "sign"), [(tasks.add, "+"), (tasks.subtract, "-")])
def test_sums_are_right_in_the_answer_and_in_the_columns(task: tasks.Task, sign: str) -> None:
    for _, answer, thought in items(task):
        head, *columns, last = thought.split("\n")
        assert eval(head.split(",")[0]) == int(answer)
        assert last == f"Together: {answer}"
        digits = [line for line in columns if ":" in line and "=" in line]
        for line in digits:
            left, right = line.split(": ")[1].split(",")[0].split(" = ")
            assert eval(left) == int(right), (sign, line)


def test_letters_and_lists_are_right() -> None:
    for question, answer, _ in items(tasks.reverse):
        if "ist:" in question or "order" in question:
            assert question.split(": ")[1].split(", ") == answer.split(", ")[::-1]
        else:
            assert answer[::-1] in question
    for question, answer, _ in items(tasks.sort):
        shown, held = question.split(": ")[1].split(", "), answer.split(", ")
        key = int if held[0].isdigit() else str
        assert held == sorted(shown, key=key, reverse="large to small" in question)
    for question, answer, _ in items(tasks.copy) + items(tasks.quote):
        assert answer in question


def test_a_passage_holds_its_answers_and_only_them() -> None:
    rng = Random(3)
    for _ in range(60):
        made = passages.passage(rng, 20, 6)
        text = "\n".join(m["content"] for m in made.messages if m["role"] != "assistant")
        for turn in made.messages:
            if turn["role"] == "assistant":
                assert turn["content"] == passages.UNKNOWN or turn["content"] in text


def test_growing_texts_are_asked_about_before_they_are_told() -> None:
    rng = Random(8)
    known = 0
    for _ in range(60):
        told = ""
        talk = passages.growing(rng, 6).messages
        for ask, turn in zip(talk[::2], talk[1::2], strict=True):
            question, _, text = ask["content"].partition("\n\n")
            told += text + "\n"
            assert question.endswith("?") and text.endswith(".")
            known += turn["content"] != passages.UNKNOWN
            assert turn["content"] == passages.UNKNOWN or turn["content"] in told
    assert 300 < known < 360


def test_a_question_can_be_made_to_stand_before_its_passage() -> None:
    rng = Random(9)
    for _ in range(30):
        asked = passages.passage(rng, 5, 1, ahead=1.0).messages[0]["content"]
        assert asked.split("\n\n")[0].endswith("?")


def test_extraction_holds_only_what_the_text_says() -> None:
    rng = Random(4)
    for _ in range(100):
        made = passages.extract(rng, rng.choice((CLASSIC, TRAINING)))
        for ask, turn in zip(made.messages[::2], made.messages[1::2], strict=True):
            for held in json.loads(turn["content"]).values():
                assert isinstance(held, bool) or str(held) in ask["content"]


def test_calls_name_a_tool_that_is_present_with_its_parameters() -> None:
    rng = Random(6)
    for _ in range(150):
        made = tools.dialogue(rng, 3)
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in made.tools}
        calls = [call for m in made.messages for call in m.get("tool_calls", [])]
        for call in calls:
            assert set(call["arguments"]) <= set(schemas[call["name"]]["properties"])


def test_the_stream_repeats_from_its_seed_and_differs_from_the_held_out_items() -> None:
    first, again = data.stream("short", 2), data.stream("short", 2)
    texts = [chat.render(next(first)) for _ in range(50)]
    assert texts == [chat.render(next(again)) for _ in range(50)]
    assert chat.render(data.evaluation("copy", 1)) not in texts


def test_scoring_takes_the_right_answer_and_no_other() -> None:
    for task in (*data.EVALUATIONS, *data.REWORDED, *data.UNSEEN, *data.CHECKS):
        item = data.evaluation(task, 0)
        want = item.answer()
        calls = want.get("tool_calls", [])
        assert evaluate.is_right(item, want["content"], calls), task
        assert not evaluate.is_right(item, "<tool_call>x", [None]), task


def test_the_template_switches_thinking_and_keeps_the_history_stable() -> None:
    talk = data.evaluation("add2", 0)
    direct = chat.render(talk, prompt_only=True)
    assert direct.endswith("<think>\n\n</think>\n\n")
    assert chat.render(talk, prompt_only=True, thinking=True).endswith("assistant\n")
    assert chat.render(talk) == direct + talk.answer()["content"] + "<|im_end|>\n"


@NEEDS_ASSETS
def test_packed_rows_hold_whole_documents_and_mark_what_the_assistant_wrote() -> None:
    encoder = chat.Encoder(ASSETS / "tokenizer.json")
    ids, written = encoder.document(data.evaluation("copy", 3))
    answer = [i for i, own in zip(ids, written, strict=True) if own]
    text = encoder.tokenizer.decode(answer, skip_special_tokens=False)
    assert text == data.evaluation("copy", 3).answer()["content"] + "<|im_end|>"
    rows = bucket_packer(encoder, "short", 1).rows()
    assert rows.ids.shape == rows.documents.shape == rows.written.shape
    for row_ids, row_documents in zip(rows.ids, rows.documents, strict=True):
        starts = [i for i in range(1, len(row_ids)) if row_documents[i] > row_documents[i - 1]]
        assert all(row_ids[i] == encoder.ids("<|im_start|>")[0] for i in starts)


@NEEDS_ASSETS
def test_the_bundled_tokenizer_keeps_digits_apart_and_text_whole() -> None:
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    assert len(tokenizer.encode("20934").ids) == 5
    for text in ("Grüße, 世界 🙂\n\ttab", "a  b", "<tool_call>{}</tool_call>", "\x00ÿ"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    settings = json.loads((ASSETS / "config.json").read_text())
    assert tokenizer.get_vocab_size() == settings["vocab_size"]


@NEEDS_ASSETS
def test_the_bundled_template_renders_as_the_training_data_was() -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    made = template.from_string((ASSETS / "chat_template.jinja").read_text())
    talk = data.evaluation("tool-two", 1)
    shown = made.render(messages=talk.prompt(), tools=talk.tools, add_generation_prompt=True)
    assert shown == chat.render(talk, prompt_only=True)


def test_a_quick_score_decodes_what_the_exact_reply_does_not_settle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [data.evaluation("capital", seed) for seed in range(3)]
    decoded: list[chat.Conversation] = []

    def direct(folder: Path, left: list[chat.Conversation], thinking: bool) -> list[bool]:
        decoded.extend(left)
        return [True] * len(left)

    monkeypatch.setattr(evaluate, "forced", lambda folder, items: [True, False, True])
    monkeypatch.setattr(evaluate, "direct", direct)
    assert evaluate.quick(ASSETS, items) == [True, True, True]
    assert decoded == [items[1]]
