"""Prompts of files: custom lines, traces with times, images."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.bench.backends import BACKENDS, RequestOptions
from radixlm.bench.datasets import DatasetOptions, Row, load_rows
from radixlm.bench.recorded import resolution
from radixlm.text.tokenizer import Tokenizer


def written(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def rows_of(tokenizer: Tokenizer, name: str, path: str = "", **values: Any) -> list[Row]:
    return load_rows(DatasetOptions(dataset_name=name, dataset_path=path, **values), tokenizer)


def test_custom_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "output_len": 5},
        {"text": "two", "max_tokens": 6},
        {"conversations": [{"role": "user", "content": "three"}]},
    ]
    path = written(tmp_path / "c.jsonl", lines)
    rows = rows_of(tokenizer, "custom", path)
    assert [(row.text, row.num_output) for row in rows] == [("one", 5), ("two", 6), ("three", 256)]
    fixed = rows_of(tokenizer, "custom", path, custom_output_len=9, num_prompts=2, seed=4)
    assert [row.num_output for row in fixed] == [9, 9]
    assert fixed == rows_of(tokenizer, "custom", path, custom_output_len=9, num_prompts=2, seed=4)
    path = written(tmp_path / "d.jsonl", [{"prompt": "a"}, {"question": "b"}])
    with pytest.raises(ConfigError, match="line 2 has no text"):
        rows_of(tokenizer, "custom", path)


def test_mooncake_keeps_times_and_shared_hashes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "hash_ids": [7, 9], "output_length": 4},
        {"timestamp": 1000, "hash_ids": [7, 8], "output_length": 3},
    ]
    written(tmp_path / "toolagent_trace.jsonl", lines)
    options = {"mooncake_workload": "toolagent", "mooncake_slowdown_factor": 0.5}
    first, second = rows_of(tokenizer, "mooncake", str(tmp_path), **options)
    assert (first.at_s, second.at_s) == (0.0, 1.0)  # half of the trace's seconds
    assert (first.num_output, second.num_output) == (3, 4)
    a, b = (str(row.text).split("\n") for row in (first, second))
    assert a[0] == b[0] and a[1] != b[1] and len(a[1].split()) == 128
    rounds = rows_of(tokenizer, "mooncake", str(tmp_path), mooncake_num_rounds=2, **options)
    assert [row.at_s for row in rounds] == [0.0, 0.0, 1.0, 1.0]
    assert str(rounds[1].text).startswith(str(rounds[0].text) + "story story story\nRound 2: ")
    with pytest.raises(ConfigError, match="no 'hash_ids'"):
        rows_of(tokenizer, "mooncake", written(tmp_path / "x", [{"timestamp": 1}]))


def test_images_of_files_and_urls(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"jpeg")
    raw = base64.b64encode(b"some png").decode()
    lines = [
        {"question": "What?", "image": "1.jpg"},
        {"question": "Who?", "image_1": "http://x/1.png"},
        {"question": "Why?", "image": raw},
    ]
    rows = rows_of(tokenizer, "mmmu", written(tmp_path / "m.jsonl", lines), custom_output_len=3)
    first = f"data:image/jpeg;base64,{base64.b64encode(b'jpeg').decode()}"
    assert [row.images for row in rows] == [
        (first,), ("http://x/1.png",), (f"data:image/png;base64,{raw}",)
    ]  # fmt: skip
    assert rows[0].text == "Question: What?\n\nAnswer: " and rows[0].num_output == 3
    options = RequestOptions("m")
    content = BACKENDS["vllm-chat"].body(rows[0], options)["messages"][0]["content"]
    assert content[0]["image_url"]["url"] == first and content[1]["text"] == rows[0].text
    native = BACKENDS["sglang"].body(rows[0], options)
    assert native["image_data"] == [first] and native["text"] == rows[0].shown
    with pytest.raises(ConfigError, match="takes no images: use --backend sglang-oai-chat"):
        BACKENDS["vllm"].body(rows[0], options)
    path = written(tmp_path / "bad.jsonl", [{"question": "What?", "image": "2.jpg"}])
    with pytest.raises(ConfigError, match=r"line 1: no image '2\.jpg'"):
        rows_of(tokenizer, "mmmu", path)


def test_random_images_follow_the_seed(tokenizer: Tokenizer) -> None:
    pillow = pytest.importorskip("PIL.Image")
    import io

    options = {"num_prompts": 2, "random_input_len": 8, "random_output_len": 4,
               "random_image_num_images": 2, "random_image_resolution": "8x12"}  # fmt: skip
    rows = rows_of(tokenizer, "random-image", **options)
    assert rows == rows_of(tokenizer, "random-image", **options)
    assert len({url for row in rows for url in row.images}) == 4
    data = base64.b64decode(rows[0].images[0].partition(",")[2])
    assert pillow.open(io.BytesIO(data)).size == (12, 8)
    assert resolution("720p") == (1280, 720)
    with pytest.raises(ConfigError, match="HEIGHTxWIDTH"):
        resolution("big")
    with pytest.raises(ConfigError, match="--tokenize-prompt: images"):
        rows_of(tokenizer, "random-image", tokenize_prompt=True, **options)


@pytest.mark.parametrize("name", ["custom", "mooncake", "mmmu"])
def test_a_file_is_needed(tokenizer: Tokenizer, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--dataset-name {name} needs --dataset-path"):
        rows_of(tokenizer, name)
    with pytest.raises(ConfigError, match="cannot read"):
        rows_of(tokenizer, name, str(tmp_path / "missing"))
