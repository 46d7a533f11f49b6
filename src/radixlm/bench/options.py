"""Command-line options that several benchmarks use."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.bench.datasets import DATASETS, DatasetOptions
from radixlm.config.verb_parser import VerbParser


def engine_parser(verb: str, about: str, usage: str = "[options]") -> VerbParser:
    """Of a benchmark that loads the model itself: the server's options may follow its own."""
    prog = f"radixlm bench {verb}"
    follow = "All options of `radixlm serve` may follow, such as --model-path FOLDER."
    return VerbParser(prog, about, usage=f"{prog} {usage} [server options]", epilog=follow)


class _Refused(argparse.Action):
    """A flag of the reference that is not served: ConfigError with the reason."""

    def __init__(self, option_strings: Sequence[str], dest: str, why: str) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)
        self.why = why

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        raise ConfigError(f"{option_string} is not served: {self.why}")


def refuse(parser: argparse.ArgumentParser, reasons: Mapping[str, str]) -> None:
    """Make flags known that are refused. `reasons`: flag -> why, and what to use instead."""
    for flag, why in reasons.items():
        parser.add_argument(flag, action=_Refused, why=why)


_RENAMED = {"image": "random-image"}  # newer SGLang's name -> ours
_NUMBERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # name, help, other names
    ("sharegpt-output-len", "output tokens, instead of the conversation's own", ()),
    ("sharegpt-context-len", "leave out conversations longer than this", ()),
    ("random-input-len", "max input tokens of random, random-ids", ("--random-input",)),
    ("random-output-len", "max output tokens of random, random-ids", ("--random-output",)),
    ("gsp-num-groups", "system prompts of generated-shared-prefix", ()),
    ("gsp-prompts-per-group", "questions behind each system prompt", ()),
    ("gsp-system-prompt-len", "tokens of a system prompt", ()),
    ("gsp-question-len", "tokens of a question", ()),
    ("gsp-output-len", "output tokens", ()),
    ("custom-output-len", "output tokens of custom (else each line's own) and mmmu", ()),
    ("mooncake-num-rounds", "rounds of each session of mooncake, sent together", ()),
    ("random-image-num-images", "images of a request of random-image", ("--image-count",)),
)


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the prompts."""
    group = parser.add_argument_group("prompts")
    base = DatasetOptions()
    group.add_argument(
        "--dataset-name",
        choices=(*DATASETS, *_RENAMED),
        help="sharegpt: conversations of --dataset-path; random: texts of drawn lengths; "
        "random-ids: random tokens; generated-shared-prefix: groups behind a system prompt; "
        "custom: lines of prompt and output_len; mooncake: a trace with its times; mmmu: lines of "
        "question and image; random-image or image: texts with images of noise "
        "(default: sharegpt if --dataset-path is given, else random)",
    )
    group.add_argument(
        "--dataset-path",
        default=base.dataset_path,
        metavar="FILE",
        help="file of the dataset (JSON or JSON lines), or ShareGPT's for the texts of random",
    )
    group.add_argument(
        "--num-prompts",
        "--num-prompt",
        type=int,
        metavar="N",
        help="number of requests (1000; all of a generated-shared-prefix)",
    )
    group.add_argument("--seed", type=int, default=base.seed, metavar="N", help="of all draws")
    number = {"type": int, "metavar": "N"}
    for name, text, alias in _NUMBERS:
        default = getattr(base, name.replace("-", "_"))
        group.add_argument(f"--{name}", *alias, default=default, help=text, **number)  # type: ignore[arg-type]
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=base.random_range_ratio,
        metavar="R",
        help="lengths of random are drawn from R times the maximum to the maximum; 1 = all equal",
    )
    group.add_argument(
        "--mooncake-slowdown-factor", type=float, default=1.0, metavar="X", help="2: half as fast"
    )
    group.add_argument(
        "--mooncake-workload",
        choices=("mooncake", "conversation", "synthetic", "toolagent"),
        default=base.mooncake_workload,
        help="WORKLOAD_trace.jsonl if --dataset-path is a folder",
    )
    group.add_argument(
        "--random-image-resolution",
        "--image-resolution",
        default=base.random_image_resolution,
        metavar="SIZE",
        help="4k, 1080p, 720p, 360p or HEIGHTxWIDTH",
    )
    group.add_argument(
        "--image-format", choices=("jpeg", "png"), default="jpeg", help="of random-image"
    )
    group.add_argument(
        "--image-content", choices=("random", "blank"), default="random", help="noise, or white"
    )
    _add_group_options(group)
    group.add_argument("--prompt-suffix", default="", metavar="TEXT", help="end of every prompt")
    group.add_argument(
        "--apply-chat-template", action="store_true", help="send rendered conversations"
    )
    group.add_argument(
        "--tokenize-prompt", action="store_true", help="send token ids instead of text"
    )


def _add_group_options(group: Any) -> None:
    """How generated-shared-prefix draws its groups."""
    group.add_argument(
        "--gsp-range-ratio",
        type=float,
        default=1.0,
        metavar="R",
        help="lengths are drawn from R times the given ones to these; 1 = all equal",
    )
    group.add_argument("--gsp-ordered", action="store_true", help="group after group, not mixed")
    group.add_argument(
        "--gsp-group-distribution",
        choices=("uniform", "zipf"),
        default="uniform",
        help="groups of one size, or drawn by Zipf's law",
    )
    group.add_argument(
        "--gsp-zipf-alpha", type=float, metavar="X", help="exponent of zipf; above 0"
    )


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of a static batch, and the short names that SGLang's examples give them."""
    for name, short, default, text in (
        ("--batch-size", "--batch", 1, "requests at once; several are measured one after another"),
        ("--input-len", "--input", 1024, "tokens of each prompt"),
        ("--output-len", "--output", 16, "tokens of each answer"),
    ):
        parser.add_argument(
            name, short, type=int, nargs="+", default=[default], metavar="N", help=text
        )


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """The values of the flags of `add_dataset_options`."""
    values = {f.name: getattr(args, f.name) for f in fields(DatasetOptions)}
    name = args.dataset_name or ("sharegpt" if args.dataset_path else "random")
    values["dataset_name"] = _RENAMED.get(name, name)
    return DatasetOptions(**values)


def json_object(text: str | None, flag: str) -> dict[str, Any]:
    """The JSON object of an option, {} if it is unset. ConfigError for other JSON."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag}: not JSON ({error}); try {flag} '{{\"top_p\": 0.9}}'") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{flag}: expected an object such as {{"top_p": 0.9}}')
    return value


def positive(values: Sequence[int], flag: str) -> None:
    """ConfigError unless all are at least 1."""
    for value in values:
        if value < 1:
            raise ConfigError(f"{flag} {value}: at least 1")
