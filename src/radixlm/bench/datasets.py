"""Prompts for benchmarks, drawn from a seed: the same for a server and the offline engine."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.bench import recorded
from radixlm.text.chat import load_chat_template
from radixlm.text.tokenizer import Tokenizer

DATASETS = (
    *("random", "random-ids", "sharegpt", "generated-shared-prefix"),
    *("custom", "mooncake", "mmmu", "random-image"),
)
IMAGE_DATASETS = ("mmmu", "random-image")
_FILES = ("sharegpt", "custom", "mooncake", "mmmu")
DEFAULT_NUM_PROMPTS = 1000
# the words of `random` if no file of conversations is given
_WORDS = (
    "the of and to in is that it was for on are as with they be at one have this from by hot word "
    "but what some we can out other were all there when up use your how said an each she which do "
    "their time if will way about many then them write would like so these her long make thing see "
    "him two has look more day could go come did number sound no most people my over know water "
    "than call first who may down side been now find any new work part take get place made live "
    "where after back little only round man year came show every good me give our under name very "
    "through just form sentence great think say help low line differ turn cause much mean before "
    "move right boy old too same tell does set three want air well also play small end put home "
    "read hand port large spell add even land here must big high such follow act why ask men "
    "change went light kind off need house picture try us again animal point mother world near "
    "build self earth father head stand own page should country found answer school grow study"
).split()


@dataclass(frozen=True, slots=True)
class Row:
    """One request: a prompt as text or token ids; lengths of prompt and output in tokens. `images`:
    URLs. `at_s`: when a trace sends it, from its start. `shown`: the text with its images, as a
    chat template writes it."""

    text: str | None
    ids: list[int] | None
    num_prompt: int
    num_output: int
    adapter: str | None = None
    images: tuple[str, ...] = ()
    at_s: float | None = None
    shown: str | None = None

    @property
    def prompt(self) -> str | list[int]:
        return self.ids if self.ids is not None else str(self.text)


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """What to draw. Field names equal the flags."""

    dataset_name: str = "random"
    dataset_path: str = ""
    num_prompts: int | None = None
    seed: int = 1
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256
    gsp_range_ratio: float = 1.0
    gsp_ordered: bool = False
    gsp_group_distribution: str = "uniform"
    gsp_zipf_alpha: float | None = None
    custom_output_len: int | None = None
    mooncake_slowdown_factor: float = 1.0
    mooncake_num_rounds: int = 1
    mooncake_workload: str = "conversation"
    random_image_num_images: int = 1
    random_image_resolution: str = "1080p"
    image_format: str = "jpeg"
    image_content: str = "random"
    prompt_suffix: str = ""
    apply_chat_template: bool = False
    tokenize_prompt: bool = False


class RowWriter:
    """Turns texts into rows: adds suffix and chat template, tokenises and counts."""

    def __init__(self, options: DatasetOptions, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._suffix, self._as_ids = options.prompt_suffix, options.tokenize_prompt
        needs_template = options.apply_chat_template or options.dataset_name in IMAGE_DATASETS
        self._template = load_chat_template(tokenizer) if needs_template else None

    def row(
        self, text: str, num_output: int, images: Sequence[str] = (), at_s: float | None = None
    ) -> Row:
        """One request. A rendered conversation is sent as ids, because it already has its BOS; with
        images as text, in which the server finds their places."""
        text += self._suffix
        if images:
            assert self._template is not None
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}} for url in images
            ]
            content = [*parts, {"type": "text", "text": text}]
            shown = self._template.render([{"role": "user", "content": content}])
            count = len(self.tokenizer.encode(shown, False))
            return Row(text, None, count, num_output, None, tuple(images), at_s, shown)
        template = self._template
        if template is None:
            ids = self.tokenizer.encode(text)
        else:
            text = template.render([{"role": "user", "content": text}])
            ids = self.tokenizer.encode(text, template.adds_special_tokens)
        if template is not None or self._as_ids:
            return Row(None, ids, len(ids), num_output, at_s=at_s)
        return Row(text, None, len(ids), num_output, at_s=at_s)


def load_rows(options: DatasetOptions, tokenizer: Tokenizer, takes_ids: bool = True) -> list[Row]:
    """The rows of a run. ``takes_ids``: whether the prompt may be token ids (not in a chat).

    ConfigError for wrong options or a file that cannot be read.
    """
    check_options(options, takes_ids)
    draw = np.random.default_rng(options.seed)
    if options.dataset_name == "random-ids":
        return _random_ids(options, tokenizer, draw, takes_ids)
    writer = RowWriter(options, tokenizer)
    if options.dataset_name == "random":
        return _random(options, writer, draw)
    if options.dataset_name == "sharegpt":
        return _sharegpt(options, writer, draw)
    if options.dataset_name == "generated-shared-prefix":
        return _shared_prefix(options, writer, draw)
    count, seed = options.num_prompts, options.seed
    if options.dataset_name == "custom":
        return recorded.drawn(list(recorded.custom_rows(options, writer)), count, seed)
    if options.dataset_name == "mooncake":
        return list(recorded.mooncake_rows(options, writer, words))
    if options.dataset_name == "mmmu":
        return recorded.drawn(list(recorded.mmmu_rows(options, writer)), count, seed)
    plain = replace(options, dataset_name="random", apply_chat_template=False, prompt_suffix="")
    texts = [(str(r.text), r.num_output) for r in _random(plain, RowWriter(plain, tokenizer), draw)]
    return list(recorded.random_image_rows(options, writer, texts))


def check_options(options: DatasetOptions, takes_ids: bool = True) -> None:
    """ConfigError for wrong options, before any slow work."""
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigError(f"--num-prompts {options.num_prompts}: at least 1")
    if not 0.0 <= options.random_range_ratio <= 1.0:
        raise ConfigError(f"--random-range-ratio {options.random_range_ratio}: between 0 and 1")
    lengths = ("random_input_len", "random_output_len", "gsp_num_groups", "gsp_prompts_per_group")
    for name in (*lengths, "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    if options.dataset_name in _FILES and not options.dataset_path:
        raise ConfigError(
            f"--dataset-name {options.dataset_name} needs --dataset-path FILE (nothing is "
            "downloaded); --dataset-name random needs none"
        )
    for name in ("mooncake_slowdown_factor", "mooncake_num_rounds", "random_image_num_images"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: more than 0")
    _check_groups(options)
    recorded.resolution(options.random_image_resolution)
    if options.dataset_name in IMAGE_DATASETS and options.tokenize_prompt:
        raise ConfigError("--tokenize-prompt: images have no token ids before the server sees them")
    for name in ("tokenize_prompt", "apply_chat_template"):
        if getattr(options, name) and not takes_ids:
            raise ConfigError(
                f"--{name.replace('_', '-')}: a chat backend takes messages, which the server "
                "renders; use --backend sglang"
            )


def _check_groups(options: DatasetOptions) -> None:
    if not 0.0 <= options.gsp_range_ratio <= 1.0:
        raise ConfigError(f"--gsp-range-ratio {options.gsp_range_ratio}: between 0 and 1")
    alpha, kind = options.gsp_zipf_alpha, options.gsp_group_distribution
    if (kind == "zipf") != (alpha is not None):
        raise ConfigError("--gsp-group-distribution zipf and --gsp-zipf-alpha 1.2 need each other")
    if alpha is not None and not 0 < alpha < math.inf:
        raise ConfigError(f"--gsp-zipf-alpha {alpha}: above 0, such as 1.2")


def _lengths(draw: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    """``count`` lengths between ``ratio * length`` and ``length``, both included."""
    low = max(int(length * ratio), 1)
    return [int(n) for n in draw.integers(low, length + 1, count)]


def _random_ids(
    options: DatasetOptions, tokenizer: Tokenizer, draw: np.random.Generator, takes_ids: bool
) -> list[Row]:
    """Uniformly drawn ids without special tokens; decoded to text for a chat backend."""
    count = options.num_prompts or DEFAULT_NUM_PROMPTS
    ratio = options.random_range_ratio
    inputs = _lengths(draw, options.random_input_len, ratio, count)
    outputs = _lengths(draw, options.random_output_len, ratio, count)
    ordinary = np.array(
        [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids], np.int64
    )
    rows = []
    for num_prompt, num_output in zip(inputs, outputs, strict=True):
        ids = ordinary[draw.integers(0, len(ordinary), num_prompt)].tolist()
        if takes_ids:
            rows.append(Row(None, ids, num_prompt, num_output))
            continue
        text = tokenizer.decode(ids)
        rows.append(Row(text, None, len(tokenizer.encode(text)), num_output))
    return rows


def _random(options: DatasetOptions, writer: RowWriter, draw: np.random.Generator) -> list[Row]:
    """Texts of drawn lengths: cut or repeated conversations of the file, or random words."""
    count = options.num_prompts or DEFAULT_NUM_PROMPTS
    ratio = options.random_range_ratio
    inputs = _lengths(draw, options.random_input_len, ratio, count)
    outputs = _lengths(draw, options.random_output_len, ratio, count)
    texts: list[str] = []
    if options.dataset_path:
        texts = [question for question, _ in read_sharegpt(options.dataset_path)]
        draw.shuffle(texts)
    rows = []
    for index, num_prompt in enumerate(inputs):
        source = texts[index % len(texts)] if texts else words(draw, num_prompt)
        rows.append(writer.row(fit(writer.tokenizer, source, num_prompt), outputs[index]))
    return rows


def _sharegpt(options: DatasetOptions, writer: RowWriter, draw: np.random.Generator) -> list[Row]:
    """First questions and the lengths of their answers, without too short and too long ones."""
    pairs = read_sharegpt(options.dataset_path)
    draw.shuffle(pairs)
    fixed = options.sharegpt_output_len
    rows: list[Row] = []
    for question, answer in pairs:
        if len(rows) == (options.num_prompts or DEFAULT_NUM_PROMPTS):
            break
        row = writer.row(question, fixed or len(writer.tokenizer.encode(answer, False)))
        if row.num_prompt < 2 or row.num_output < 2:
            continue
        max_len = options.sharegpt_context_len
        if max_len is None or row.num_prompt + row.num_output <= max_len:
            rows.append(row)
    if not rows:
        raise ConfigError(f"--dataset-path {options.dataset_path}: no conversation is usable")
    return rows


def _shared_prefix(
    options: DatasetOptions, writer: RowWriter, draw: np.random.Generator
) -> list[Row]:
    """Questions in groups that share a system prompt, in random order unless ``gsp_ordered``."""
    pairs: list[tuple[str, int]] = []
    tokenizer, ratio = writer.tokenizer, options.gsp_range_ratio
    for size in _group_sizes(options):
        (length,) = _lengths(draw, options.gsp_system_prompt_len, ratio, 1)
        system = fit(tokenizer, words(draw, length), length)
        questions = _lengths(draw, options.gsp_question_len, ratio, size)
        outputs = _lengths(draw, options.gsp_output_len, ratio, size)
        for length, num_output in zip(questions, outputs, strict=True):
            question = fit(tokenizer, words(draw, length), length)
            pairs.append((f"{system}\n\n{question}", num_output))
    if not options.gsp_ordered:
        draw.shuffle(pairs)
    return [writer.row(*pair) for pair in pairs[: options.num_prompts]]


def _group_sizes(options: DatasetOptions) -> list[int]:
    """Requests of each group: equal, or those that Zipf's law draws, the first group's the most."""
    count, each = options.gsp_num_groups, options.gsp_prompts_per_group
    if options.gsp_zipf_alpha is None:
        return [each] * count
    weights = np.arange(1, count + 1, dtype=np.float64) ** -options.gsp_zipf_alpha
    draw = np.random.default_rng([options.seed, 3])
    sizes: list[int] = draw.multinomial(count * each, weights / weights.sum()).tolist()
    return sizes


def read_sharegpt(path: str) -> list[tuple[str, str]]:
    """(question, answer) of each conversation of a ShareGPT file, JSON or JSON lines."""
    try:
        entries = list(_entries(Path(path).expanduser().read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error}") from error
    pairs = []
    for entry in entries:
        turns = entry.get("conversations") or entry.get("conversation") or []
        texts = [str(turn.get("value", turn.get("content", ""))) for turn in turns[:2]]
        if len(texts) == 2:
            pairs.append((texts[0], texts[1]))
    if not pairs:
        raise ConfigError(
            f"--dataset-path {path}: expected entries with "
            '{"conversations": [{"value": question}, {"value": answer}]}'
        )
    return pairs


def _entries(text: str) -> Iterator[dict[str, Any]]:
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)


def words(draw: np.random.Generator, count: int) -> str:
    """``count`` words in sentences of about twelve."""
    chosen = [_WORDS[int(i)] for i in draw.integers(0, len(_WORDS), count)]
    for start in range(0, count, 12):
        chosen[start] = chosen[start].capitalize()
        last = min(start + 11, count - 1)
        chosen[last] += "."
    return " ".join(chosen)


def fit(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """`text` cut or repeated to about `num_tokens` tokens, including special tokens that the
    tokenizer adds. Merges at the cut may change the count by a few."""
    ids = tokenizer.encode(text) or [0]
    while len(ids) < num_tokens:
        text = f"{text} {text}"
        ids = tokenizer.encode(text)
    best, distance = text, len(ids) - num_tokens
    keep = num_tokens
    for _ in range(4):  # a cut may change how the last word is tokenised
        cut = tokenizer.decode(ids[:keep])
        length = len(tokenizer.encode(cut))
        if abs(length - num_tokens) < distance:
            best, distance = cut, abs(length - num_tokens)
        if length == num_tokens or not 0 < keep + num_tokens - length <= len(ids):
            break
        keep += num_tokens - length
    return best
