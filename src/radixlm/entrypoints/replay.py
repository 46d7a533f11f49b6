"""``radixlm replay``: send the requests of a crash dump again and compare the answers."""

from __future__ import annotations

import base64
import json
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from radixlm.base.errors import ConfigError, RadixError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from radixlm.config.parser import parse
from radixlm.config.server_config import flat
from radixlm.config.verb_parser import VerbParser

FORMAT = 1
TIMEOUT_S = 600.0
SHOWN = 20
_SENT = (
    *("logit_processor", "lora_path", "cache_salt", "extra_key", "priority"),
    *("streaming_window", "streaming_sinks", "max_thinking_tokens"),
)
Send = Callable[[dict[str, Any]], dict[str, Any]]


class Refused(RadixError):
    """The server did not answer the request."""


def read_dump(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, requests) of a file of --crash-dump-folder; ConfigError for any other file."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a file of --crash-dump-folder: {error}") from error
    good = bool(lines) and all(isinstance(line, dict) for line in lines)
    if not good or lines[0].get("radixlm_requests") != FORMAT:
        raise ConfigError(f"{path} is not a file of --crash-dump-folder (format {FORMAT})")
    return lines[0], lines[1:]


def why_not(record: dict[str, Any]) -> str | None:
    """Why /generate cannot send this request again; None if it can."""
    if record.get("pooling"):
        return "it asks for a vector"
    if record.get("num_media"):
        return "its images are not on record"
    grammar = record.get("grammar")
    if grammar and (grammar.get("after") or grammar["kind"] not in record["sampling_params"]):
        return "its grammar comes from a chat"
    return None


def as_body(record: dict[str, Any]) -> dict[str, Any]:
    """The body of /generate for the request."""
    body: dict[str, Any] = {"sampling_params": record["sampling_params"]}
    if record.get("embeds") is not None:
        numbers = np.frombuffer(base64.b64decode(record["embeds"]), "<f4")
        body["input_embeds"] = numbers.reshape(record["num_embeds"], -1).tolist()
    else:
        body["input_ids"] = record["input_ids"]
    for name in _SENT:
        if record.get(name) is not None:
            body[name] = record[name]
    return body


def judge(record: dict[str, Any], answer: dict[str, Any]) -> str | None:
    """Where the answer differs from the recorded one; None if it does not. For a request that had
    not ended, only the beginning is recorded."""
    want, got = record["output_ids"], answer["output_ids"]
    is_whole = (record.get("finish_reason") or {}).get("kind") in ("stop", "length")
    for place, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return f"token {place} is {b}, it was {a}"
    if len(got) < len(want) or (is_whole and len(got) != len(want)):
        return f"{len(got)} tokens, there were {len(want)}"
    return None


def over_http(url: str, key: str | None) -> Send:
    """Sends requests to a server."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"

    def send(body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/generate", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            raise Refused(
                f"status {error.code}: {error.read(300).decode(errors='replace')}"
            ) from None
        except OSError as error:
            raise Refused(f"no answer: {error}") from None

    return send


def replay(
    records: list[dict[str, Any]], send: Send, num_at_once: int, show: Callable[[str], None] = print
) -> Counter[str]:
    """Send all requests; how many answers are the same, different, failed and skipped."""
    found: Counter[str] = Counter()

    def one(record: dict[str, Any]) -> tuple[str, str]:
        reason = why_not(record)
        if reason is not None:
            return "skipped", reason
        try:
            difference = judge(record, send(as_body(record)))
        except RadixError as error:
            return "failed", str(error)
        return ("different", difference) if difference else ("same", "")

    with ThreadPoolExecutor(num_at_once) as pool:
        for record, (verdict, why) in zip(records, pool.map(one, records), strict=True):
            found[verdict] += 1
            if why and found[verdict] <= SHOWN:
                show(f"{verdict} {record['rid']}: {why}")
    return found


@contextmanager
def offline(header: dict[str, Any], options: list[str]) -> Iterator[Send]:
    """An offline engine, with the model of the dump unless ``options`` name another."""
    config, given = parse(options, prog="radixlm replay")
    values = {name: v for name, v in flat(config, show_secrets=True).items() if name in given}
    values.setdefault("model_path", header["server_args"].get("model_path"))
    level = config.observe.log_level if "log_level" in given else "warning"
    set_up_logging("replay", level, log_format=config.observe.log_format)
    with load("radixlm.entrypoints.offline:Engine")(**values) as engine:
        yield lambda body: engine.generate(**body)


def main(argv: list[str]) -> int:
    """0: all answers are the same; 1: some differ or failed; 2: the file is not a dump."""
    parser = VerbParser(
        "radixlm replay",
        "Send the requests of a crash dump again, and compare the answers.",
        epilog="Without --url the model is loaded here; other options are the server's.",
    )
    parser.add_argument("file", help="a file of --crash-dump-folder")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--key", help="its API key")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at once")
    parser.add_argument("--rid", help="only this request")
    args, rest = parser.parse_known_args(argv)
    header, records = read_dump(args.file)
    records = [r for r in records if args.rid in (None, r["rid"])]
    if not records:
        raise ConfigError(f"{args.file}: no request{f' {args.rid!r}' if args.rid else ''}")
    if args.url and rest:
        raise ConfigError(f"{rest[0]}: with --url the server has its options already")
    number = max(1, args.concurrency)
    if args.url:
        found = replay(records, over_http(args.url, args.key), number)
    else:
        with offline(header, rest) as send:
            found = replay(records, send, number)
    print(", ".join(f"{found[name]} {name}" for name in ("same", "different", "failed", "skipped")))
    return int(bool(found["different"] or found["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
