"""`radixlm bench perplexity`: how well a model predicts a text, and another one beside it.

The text is cut into pieces of `--context` tokens; the first token of a piece is given, each other
one is predicted from those before it. Other options are those of the server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radixlm.base.errors import ConfigError
from radixlm.bench import report
from radixlm.bench.offline import engine_options
from radixlm.bench.options import Parser
from radixlm.entrypoints.offline import Engine

_TOGETHER = 16  # pieces that the engine gets at a time


def build_parser() -> Parser:
    """The flags of this verb."""
    parser = Parser(
        "radixlm bench perplexity",
        "How well models predict a text.",
        usage="radixlm bench perplexity --text FILE [--against MODEL] [server options]",
        epilog="All options of `radixlm serve` may follow, such as --model-path FOLDER.",
    )
    group = parser.add_argument_group("text")
    group.add_argument("--text", required=True, metavar="FILE", help="a text in UTF-8")
    group.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens of a piece (default: 512)"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="read so many tokens at most")
    group.add_argument("--against", metavar="MODEL", help="measure this model too, and compare")
    group = parser.add_argument_group("results")
    group.add_argument("--output-file", metavar="FILE", help="append a line of JSON")
    group.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return parser


def main(argv: Sequence[str]) -> int:
    """0 once the text was read."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    report.check_writable(args.output_file)
    if args.context < 2 or (args.max_tokens is not None and args.max_tokens < 2):
        raise ConfigError("--context and --max-tokens: use 2 or more")
    try:
        text = Path(args.text).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {error}") from error
    options = engine_options(rest, "radixlm bench perplexity", parser)
    result = measure(options, text, args.context, args.max_tokens)
    results = [result]
    if args.against:
        options = {**options, "model_path": args.against}
        results.append(measure(options, text, args.context, args.max_tokens))
        results[1]["ratio"] = results[1]["perplexity"] / result["perplexity"]
    if args.output_file:
        report.append_jsonl(args.output_file, results)
    for one in results:
        print(json.dumps(one) if args.json else _line(one))
    return 0


def _line(result: dict[str, Any]) -> str:
    ratio = f" ({result['ratio']:.4f} of the first)" if "ratio" in result else ""
    low, high = result["low"], result["high"]
    return (
        f"{result['model']}: perplexity {result['perplexity']:.4f}{ratio}, 95 % within "
        f"{low:.4f} and {high:.4f}, {result['num_tokens']} tokens"
    )


def measure(
    options: dict[str, Any], text: str, context: int, max_tokens: int | None
) -> dict[str, Any]:
    """Perplexity of the model that ``options`` of ``Engine`` name, with a 95 % interval by the
    spread of the pieces' means. ConfigError for a text without a second token."""
    with Engine(**options) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(text)[:max_tokens]
        context = min(context, engine.get_server_info()["max_req_input_len"])
        pieces = [ids[i : i + context] for i in range(0, len(ids), context)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        if not pieces:
            raise ConfigError("--text: holds no two tokens")
        sums = []
        bar = tqdm(total=len(ids), desc="reading", unit="token", disable=None)
        with bar:
            for first in range(0, len(pieces), _TOGETHER):
                some = pieces[first : first + _TOGETHER]
                sums += _losses(engine, some)
                bar.update(sum(map(len, some)))
        path = engine.get_server_info()["model_path"]
    counts = [len(piece) - 1 for piece in pieces]
    total, count = math.fsum(sums), sum(counts)
    mean = total / count
    # the variance of a ratio of sums over pieces
    spread = math.fsum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    many = len(pieces)
    half = 1.96 * math.sqrt(spread * many / max(1, many - 1)) / count
    return {
        "model": path,
        "perplexity": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "num_tokens": count,
        "context": context,
    }


def _losses(engine: Engine, pieces: list[list[int]]) -> list[float]:
    """The sum of -log p of each piece's tokens but the first."""
    answers = engine.generate(
        input_ids=pieces,
        sampling_params={"max_new_tokens": 0, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [
        -math.fsum(entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:])
        for answer in answers
    ]
