"""``radixlm run-batch``: answer a file of OpenAI batch requests without a server."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from tqdm import tqdm

from radixlm.base.errors import ConfigError
from radixlm.base.log import set_up_logging
from radixlm.config.parser import parse
from radixlm.engine.launch import ProgramEngine, engine_for_program, intake_tokenizer, start
from radixlm.engine.model_info import resolved
from radixlm.entrypoints.http.app import make_state
from radixlm.entrypoints.http.batches.lines import Line, answer_line
from radixlm.entrypoints.http.batches.runner import check_lines
from radixlm.entrypoints.http.state import ServerState

USAGE = """usage: radixlm run-batch INPUT.jsonl -o OUTPUT.jsonl [server options]

INPUT has one request a line: {"custom_id": ..., "method": "POST", "url": ..., "body": {...}} with
the url of a chat, completions, embeddings, score or rerank route. OUTPUT gets one answer a line,
in the order in which they end. Server options: radixlm serve --help."""
MAX_AT_ONCE = 64
_INPUT = ("-i", "--input-file", "--input")
_OUTPUT = ("-o", "--output-file", "--output")


def _own(argv: list[str]) -> tuple[str, str, list[str]]:
    """Input, output and the server's options."""
    found: dict[str, str] = {}
    rest: list[str] = []
    args = iter(argv)
    for arg in args:
        name, has_value, value = arg.partition("=")
        if name in _INPUT + _OUTPUT:
            found["in" if name in _INPUT else "out"] = value if has_value else next(args, "")
        elif not arg.startswith("-") and not rest and "in" not in found:
            found["in"] = arg
        else:
            rest.append(arg)
    if not found.get("in") or not found.get("out"):
        raise ConfigError(f"INPUT and -o OUTPUT are needed\n\n{USAGE}")
    return found["in"], found["out"], rest


def main(argv: list[str]) -> int:
    """Answer all lines; 1 if some failed."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    source, target, rest = _own(argv)
    config, given = parse(rest, prog="radixlm run-batch")
    level = config.observe.log_level if "log_level" in given else "warning"
    set_up_logging("run-batch", level, log_format=config.observe.log_format)
    lines = _lines(source)
    if os.path.realpath(source) == os.path.realpath(target):
        raise ConfigError(f"-o {target}: is the input too; name another file")
    config, info = resolved(config, given)
    tokenizer = intake_tokenizer(config, info)
    engine = engine_for_program(config, given, info, tokenizer)
    state = make_state(config, info, tokenizer, engine.intake)
    with _opened(target) as out:
        num_failed = asyncio.run(_run(engine, state, lines, out))
    print(f"{len(lines) - num_failed} answered, {num_failed} failed: {target}", file=sys.stderr)
    return 1 if num_failed else 0


def _lines(source: str) -> list[Line]:
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from error
    lines, errors = check_lines(data, None)
    if errors:
        shown = "\n".join(f"{_place(source, e['line'])}: {e['message']}" for e in errors[:20])
        raise ConfigError(shown)
    return list(lines)


def _place(source: str, line: int | None) -> str:
    return source if line is None else f"{source}:{line}"


def _opened(target: str) -> BinaryIO:
    try:
        return Path(target).open("wb")
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from error


async def _run(engine: ProgramEngine, state: ServerState, lines: list[Line], out: BinaryIO) -> int:
    """Answer ``lines``; how many failed."""
    await start(engine)
    feed, counts = iter(lines), {"failed": 0}
    with tqdm(total=len(lines), unit="request", disable=not sys.stderr.isatty()) as bar:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_AT_ONCE, len(lines))):
                group.create_task(_work(state, feed, out, bar, counts))
    await engine.stop()
    return counts["failed"]


async def _work(
    state: ServerState, feed: Any, out: BinaryIO, bar: Any, counts: dict[str, int]
) -> None:
    for line in feed:
        answer = await answer_line(state, line)
        counts["failed"] += answer["response"]["status_code"] >= 400
        out.write(orjson.dumps(answer) + b"\n")
        bar.update()
