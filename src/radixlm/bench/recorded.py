"""Prompts of files: custom lines, Mooncake's traces, and prompts with images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import require

if TYPE_CHECKING:
    from radixlm.bench.datasets import DatasetOptions, Row, RowWriter

RESOLUTIONS = {"4k": (3840, 2160), "1080p": (1920, 1080), "720p": (1280, 720), "360p": (640, 360)}
_BLOCK_WORDS = 128  # of a hash of a trace
_OUTPUT_LEN = 256
_LENGTHS = ("output_len", "output_tokens", "output_length", "max_tokens")


def file_lines(options: DatasetOptions, hint: str) -> tuple[Path, list[dict[str, Any]]]:
    """--dataset-path and its JSON lines (or array). ConfigError if it cannot be read."""
    path = Path(options.dataset_path).expanduser()
    if path.is_dir() and options.dataset_name == "mooncake":
        path /= f"{options.mooncake_workload}_trace.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        rows = json.loads(text) if whole else [json.loads(x) for x in text.split("\n") if x.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--dataset-path {path}: expected lines such as {hint}")
    return path, rows


def custom_rows(options: DatasetOptions, writer: RowWriter) -> Iterator[Row]:
    """Lines of `prompt` (or `text`, or `conversations`) with `output_len`, which
    --custom-output-len overrides."""
    path, lines = file_lines(options, '{"prompt": "...", "output_len": 64}')
    for number, line in enumerate(lines, 1):
        turns = line.get("conversations") or line.get("messages") or [{}]
        first = turns[0].get("value", turns[0].get("content"))
        text = line.get("prompt", line.get("text", first))
        if not isinstance(text, str):
            raise ConfigError(f"--dataset-path {path}: line {number} has no text in 'prompt'")
        length = next((line[name] for name in _LENGTHS if line.get(name)), None)
        yield writer.row(text, int(options.custom_output_len or length or _OUTPUT_LEN))


def mooncake_rows(options: DatasetOptions, writer: RowWriter, make_words: Any) -> Iterator[Row]:
    """Sessions of a trace at their times (`timestamp` in ms, `hash_ids`, `output_length`). A hash
    stands for words drawn from it, so that equal hashes are equal text; each round repeats the
    session so far, with made-up answers."""
    path, lines = file_lines(options, '{"timestamp": 0, "hash_ids": [1], "output_length": 64}')
    for number, line in enumerate(lines, 1):
        if missing := [n for n in ("timestamp", "hash_ids") if n not in line]:
            raise ConfigError(f"--dataset-path {path}: line {number} has no {missing[0]!r}")
    lines.sort(key=lambda line: float(line["timestamp"]))
    begin = float(lines[0]["timestamp"])
    for line in lines[: options.num_prompts]:
        blocks = [make_words(np.random.default_rng(int(h)), _BLOCK_WORDS) for h in line["hash_ids"]]
        context = "\n".join([*blocks, "Tell me a story about this."])
        length = int(line.get("output_length") or _OUTPUT_LEN)
        at_s = (float(line["timestamp"]) - begin) / 1000 * options.mooncake_slowdown_factor
        said = ""
        for number in range(1, options.mooncake_num_rounds + 1):
            said += f"Round {number}: {context}\n"
            yield writer.row(said, length, at_s=at_s)
            said += " ".join(["story"] * length) + "\n"


def resolution(text: str) -> tuple[int, int]:
    """(width, height) of a name or of HEIGHTxWIDTH in pixels."""
    if text in RESOLUTIONS:
        return RESOLUTIONS[text]
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        names = ", ".join(RESOLUTIONS)
        raise ConfigError(f"--random-image-resolution {text}: {names} or HEIGHTxWIDTH")
    return int(width), int(height)


def random_image_rows(
    options: DatasetOptions, writer: RowWriter, texts: Iterable[tuple[str, int]]
) -> Iterator[Row]:
    """Texts with images of noise, or white ones; JPEG has quality 85."""
    pillow = require("PIL.Image", "multimodal", "--dataset-name random-image")
    width, height = resolution(options.random_image_resolution)
    draw = np.random.default_rng([options.seed, 2])
    for text, length in texts:
        images = []
        for _ in range(options.random_image_num_images):
            pixels = np.full((height, width, 3), 255, np.uint8)
            if options.image_content == "random":
                pixels = draw.integers(0, 256, (height, width, 3), np.uint8)
            file = io.BytesIO()
            pillow.fromarray(pixels).save(file, options.image_format, quality=85)
            images.append(_data_uri(file.getvalue(), options.image_format))
        yield writer.row(text, length, images=images)


def mmmu_rows(options: DatasetOptions, writer: RowWriter) -> Iterator[Row]:
    """Lines of `question` and `image` (or `image_1`): a file beside this one, a data: or http URL,
    or base64."""
    path, lines = file_lines(options, '{"question": "...", "image": "1.png"}')
    for number, line in enumerate(lines, 1):
        image = line.get("image") or line.get("image_1")
        if not isinstance(image, str) or not isinstance(line.get("question"), str):
            raise ConfigError(f"--dataset-path {path}: line {number} lacks 'question' or 'image'")
        text = f"Question: {line['question']}\n\nAnswer: "
        length = options.custom_output_len or _OUTPUT_LEN
        yield writer.row(text, length, images=[_image_url(image, path, number)])


def _image_url(image: str, path: Path, number: int) -> str:
    if image.startswith(("data:", "http://", "https://")):
        return image
    file = path.parent / image
    try:
        if len(image) < 512 and file.is_file():
            return _data_uri(file.read_bytes(), file.suffix.lstrip(".").replace("jpg", "jpeg"))
        return _data_uri(base64.b64decode(image, validate=True), "png")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--dataset-path {path}: line {number}: no image {image[:80]!r}"
        ) from error


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def drawn(rows: Sequence[Row], count: int | None, seed: int) -> list[Row]:
    """`count` rows by the seed, in their order; all if there are no more."""
    if count is None or count >= len(rows):
        return list(rows)
    chosen = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return [rows[i] for i in sorted(chosen.tolist())]
