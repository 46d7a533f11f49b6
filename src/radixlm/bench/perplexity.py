"""`radixlm bench perplexity`: how well a model predicts a text, and another one beside it.

The text is cut into pieces of `--context` tokens; the first token of a piece is given, each other
one is predicted from those before it. With `--streaming-window` the text is one stream, of which
a request with this window would see as much; quarters of it tell whether it gets worse. Other
options are those of the server.
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
from radixlm.bench.options import engine_parser
from radixlm.config.schedule import MIN_WINDOW
from radixlm.config.verb_parser import VerbParser
from radixlm.entrypoints.offline import Engine
from radixlm.wire.requests import StreamingWindow

_TOGETHER = 16  # pieces that the engine gets at a time


def build_parser() -> VerbParser:
    """The flags of this verb."""
    about = "How well models predict a text."
    parser = engine_parser("perplexity", about, "--text FILE [--against MODEL]")
    group = parser.add_argument_group("text")
    group.add_argument("--text", required=True, metavar="FILE", help="a text in UTF-8")
    group.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens of a piece (default: 512)"
    )
    group.add_argument("--streaming-window", type=int, metavar="N", help="of one stream instead")
    group.add_argument("--streaming-sinks", type=int, default=4, metavar="N", help="(default: 4)")
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
    options = engine_options(rest, parser)
    window = None
    if args.streaming_window is not None:
        if args.streaming_window < MIN_WINDOW or args.streaming_sinks < 1:
            raise ConfigError(f"--streaming-window: use {MIN_WINDOW} or more, and 1 sink or more")
        window = StreamingWindow(args.streaming_window, args.streaming_sinks)
    result = measure(options, text, args.context, args.max_tokens, window)
    results = [result]
    if args.against:
        options = {**options, "model_path": args.against}
        results.append(measure(options, text, args.context, args.max_tokens, window))
        results[1]["ratio"] = results[1]["perplexity"] / result["perplexity"]
    if args.output_file:
        report.append_jsonl(args.output_file, results)
    for one in results:
        print(json.dumps(one) if args.json else _line(one))
    return 0


def _line(result: dict[str, Any]) -> str:
    ratio = f" ({result['ratio']:.4f} of the first)" if "ratio" in result else ""
    low, high = result["low"], result["high"]
    within = "" if low is None else f", 95 % within {low:.4f} and {high:.4f}"
    return (
        f"{result['model']}: perplexity {result['perplexity']:.4f}{ratio}{within}, "
        f"{result['num_tokens']} tokens"
        + "".join(f", {one:.4f}" for one in result.get("quarters", ()))
    )


def pieces_of(ids: list[int], context: int) -> list[tuple[list[int], int]]:
    """Pieces of a text, and the first token of each that is predicted."""
    pieces = [ids[i : i + context] for i in range(0, len(ids), context)]
    return [(piece, 1) for piece in pieces if len(piece) > 1]


def stream_of(ids: list[int], window: StreamingWindow) -> list[tuple[list[int], int]]:
    """The same of one stream: what is seen while the window stays where it is, and as far as."""
    pieces, first = [], 1
    while first < len(ids):
        count = window.num_dropped(first)
        end = min(len(ids), count + window.size)
        seen = ids[: window.sinks] + ids[window.sinks + count : end]
        pieces.append((seen, first - count))
        first = end
    return pieces


def measure(
    options: dict[str, Any],
    text: str,
    context: int,
    max_tokens: int | None,
    window: StreamingWindow | None = None,
) -> dict[str, Any]:
    """Perplexity of the model that ``options`` of ``Engine`` name, with a 95 % interval by the
    spread of the pieces' means, None of one piece. ConfigError where nothing is predicted."""
    with Engine(**options) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(text)[:max_tokens]
        context = min(context, engine.get_server_info()["max_req_input_len"])
        pieces = pieces_of(ids, context) if window is None else stream_of(ids, window)
        if not pieces:
            raise ConfigError("--text: holds no two tokens")
        sums = []
        bar = tqdm(total=len(ids), desc="reading", unit="token", disable=None)
        with bar:
            for first in range(0, len(pieces), _TOGETHER):
                some = pieces[first : first + _TOGETHER]
                sums += _losses(engine, some)
                bar.update(sum(len(piece) - start for piece, start in some))
        path = engine.get_server_info()["model_path"]
    counts = [len(piece) - start for piece, start in pieces]
    total, count = math.fsum(sums), sum(counts)
    mean = total / count
    # the variance of a ratio of sums over pieces
    spread = math.fsum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    many = len(pieces)
    half = 1.96 * math.sqrt(spread * many / (many - 1)) / count if many > 1 else None
    quarters = [slice(many * i // 4, many * (i + 1) // 4) for i in range(4 * (many > 3))]
    means = [math.fsum(sums[one]) / sum(counts[one]) for one in quarters]
    more = {"quarters": list(map(math.exp, means))} if window is not None else {}
    return {
        "model": path,
        "perplexity": math.exp(mean),
        "low": None if half is None else math.exp(mean - half),
        "high": None if half is None else math.exp(mean + half),
        "num_tokens": count,
        "context": context if window is None else window.size,
    } | more


def _losses(engine: Engine, pieces: list[tuple[list[int], int]]) -> list[float]:
    """The sum of -log p of each piece's tokens from the first that is predicted on."""
    answers = engine.generate(
        input_ids=[piece for piece, _ in pieces],
        sampling_params={"max_new_tokens": 0, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=[start - 1 for _, start in pieces],
    )
    return [
        -math.fsum(entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:])
        for answer in answers
    ]
