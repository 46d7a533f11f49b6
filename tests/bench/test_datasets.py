"""Drawn prompts: lengths, seeds, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import ConfigError
from radixlm.bench.datasets import DatasetOptions, fit, load_rows, read_sharegpt, words
from radixlm.text.tokenizer import Tokenizer

SMALL = {"num_prompts": 12, "random_input_len": 40, "random_output_len": 10}


def rows_of(tokenizer: Tokenizer, takes_ids: bool = True, **options: Any) -> Any:
    return load_rows(DatasetOptions(**options), tokenizer, takes_ids)


@pytest.mark.parametrize("name", ["random", "random-ids"])
def test_lengths_are_drawn_within_their_range(name: str, tokenizer: Tokenizer) -> None:
    rows = rows_of(tokenizer, dataset_name=name, random_range_ratio=0.5, **SMALL)
    assert len(rows) == 12 and len({row.num_prompt for row in rows}) > 3
    assert all(19 <= row.num_prompt <= 41 and 5 <= row.num_output <= 10 for row in rows)
    equal = rows_of(tokenizer, dataset_name="random-ids", random_range_ratio=1.0, **SMALL)
    assert {(row.num_prompt, row.num_output) for row in equal} == {(40, 10)}


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix"])
def test_a_seed_draws_the_same_rows(name: str, tokenizer: Tokenizer) -> None:
    group = {"gsp_num_groups": 2, "gsp_system_prompt_len": 8, "gsp_question_len": 4}
    options = {"dataset_name": name, **SMALL, **group}
    again = rows_of(tokenizer, seed=3, **options)
    assert rows_of(tokenizer, seed=3, **options) == again
    assert rows_of(tokenizer, seed=4, **options) != again


def test_random_ids_are_ordinary_tokens_and_text_for_a_chat(tokenizer: Tokenizer) -> None:
    rows = rows_of(tokenizer, dataset_name="random-ids", **SMALL)
    assert not any(tokenizer.special_ids & set(row.ids) for row in rows)
    assert all(len(row.ids) == row.num_prompt and row.text is None for row in rows)
    spoken = rows_of(tokenizer, False, dataset_name="random-ids", **SMALL)
    assert all(row.ids is None for row in spoken)
    assert [row.num_prompt for row in spoken] == [len(tokenizer.encode(r.text)) for r in spoken]


def test_tokenized_prompts_have_the_ids_of_their_text(tokenizer: Tokenizer) -> None:
    plain = rows_of(tokenizer, dataset_name="random", prompt_suffix=" end", **SMALL)
    ids = rows_of(
        tokenizer, dataset_name="random", prompt_suffix=" end", tokenize_prompt=True, **SMALL
    )
    assert all(row.text.endswith(" end") for row in plain)
    assert [row.ids for row in ids] == [tokenizer.encode(row.text) for row in plain]


def test_groups_share_their_system_prompt(tokenizer: Tokenizer) -> None:
    rows = rows_of(
        tokenizer,
        dataset_name="generated-shared-prefix",
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=30,
        gsp_question_len=5,
        gsp_output_len=6,
    )
    groups: dict[str, int] = {}
    for row in rows:
        system, _, _question = row.text.partition("\n\n")
        groups[system] = groups.get(system, 0) + 1
    assert sorted(groups.values()) == [4, 4, 4]
    assert {row.num_output for row in rows} == {6}
    assert len({row.text for row in rows}) == 12


def test_groups_by_zipf_in_order_with_drawn_lengths(tokenizer: Tokenizer) -> None:
    rows = rows_of(
        tokenizer,
        dataset_name="generated-shared-prefix",
        gsp_num_groups=4,
        gsp_prompts_per_group=10,
        gsp_system_prompt_len=12,
        gsp_question_len=5,
        gsp_output_len=6,
        gsp_range_ratio=0.5,
        gsp_ordered=True,
        gsp_group_distribution="zipf",
        gsp_zipf_alpha=2.0,
    )
    systems = [row.text.partition("\n\n")[0] for row in rows]
    assert len(rows) == 40 and sorted(systems, key=systems.index) == systems
    assert systems.count(systems[0]) > 20
    assert {row.num_output for row in rows} == {3, 4, 5, 6}


def conversations() -> list[dict[str, Any]]:
    turns = [
        ("Hello world, how are you?", "this is what it is. " * 3),
        ("x", "far too short"),
        ("The quick brown fox", "jumps over the lazy dog" * 20),
        ("only a question", None),
    ]
    return [{"conversations": [{"value": v} for v in pair if v is not None]} for pair in turns]


@pytest.mark.parametrize("is_lines", [True, False])
def test_sharegpt_files(is_lines: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    entries = conversations()
    lines = "\n".join(map(json.dumps, entries)) + "\n"
    file.write_text(lines if is_lines else json.dumps(entries))
    assert len(read_sharegpt(str(file))) == 3
    options = {"dataset_name": "sharegpt", "dataset_path": str(file)}
    rows = rows_of(tokenizer, **options)
    answers = dict(read_sharegpt(str(file)))
    assert {row.text for row in rows} == {"Hello world, how are you?", "The quick brown fox"}
    for row in rows:
        assert row.num_output == len(tokenizer.encode(answers[row.text], False))
    short = rows_of(tokenizer, sharegpt_context_len=40, **options)
    assert [row.text for row in short] == ["Hello world, how are you?"]
    fixed = rows_of(tokenizer, sharegpt_output_len=9, num_prompts=1, **options)
    assert [row.num_output for row in fixed] == [9]
    cut = rows_of(tokenizer, **(options | SMALL | {"dataset_name": "random"}))
    assert len(cut) == 12 and all("Hello" in r.text[:6] or "The" in r.text[:6] or "x" in r.text[:6]
                                  for r in cut if r.num_prompt > 3)  # fmt: skip


def test_a_chat_template_is_rendered_and_sent_as_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(conversations()[:1]))
    rows = rows_of(
        tokenizer, dataset_name="sharegpt", dataset_path=str(file), apply_chat_template=True
    )
    assert tokenizer.decode(rows[0].ids) == "<user>Hello world, how are you?<bot>"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(num_tokens=st.integers(1, 120), seed=st.integers(0, 50))
def test_a_text_is_cut_to_its_length(num_tokens: int, seed: int, tokenizer: Tokenizer) -> None:
    import numpy as np

    text = fit(tokenizer, words(np.random.default_rng(seed), 30), num_tokens)
    assert abs(len(tokenizer.encode(text)) - num_tokens) <= 1


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"random_range_ratio": 1.5}, "--random-range-ratio"),
        ({"random_input_len": 0}, "--random-input-len"),
        ({"gsp_num_groups": 0}, "--gsp-num-groups"),
        ({"gsp_range_ratio": 2.0}, "--gsp-range-ratio"),
        ({"gsp_zipf_alpha": 2.0}, "--gsp-group-distribution zipf"),
        ({"gsp_zipf_alpha": 0.0, "gsp_group_distribution": "zipf"}, "--gsp-zipf-alpha 0.0"),
        ({"dataset_name": "sharegpt"}, "--dataset-path"),
        ({"dataset_name": "sharegpt", "dataset_path": "/nowhere"}, "/nowhere"),
    ],
)
def test_impossible_options_are_refused(
    options: dict[str, Any], flag: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=flag):
        rows_of(tokenizer, **options)


@pytest.mark.parametrize("name", ["tokenize_prompt", "apply_chat_template"])
def test_a_chat_takes_no_ids(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        rows_of(tokenizer, False, **{name: True})


@pytest.mark.parametrize("text", ["[1", "{}", '[{"conversations": []}]', "\xff"])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="--dataset-path"):
        read_sharegpt(str(file))
