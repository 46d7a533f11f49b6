"""Flags of SGLang's serving benchmark that say how a server is reached and profiled, and those that
are refused."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from radixlm.base.errors import ConfigError, TransferError
from radixlm.bench.client import HttpClient

_POLL_S = 0.5
_BODY = "give the field by --extra-request-body"
_WORKERS = "run `radixlm profile --url WORKER` beside it"
_SPEED = "the lines as --dataset-name custom work"
REFUSED_FLAGS = {
    "--print-requests": "--output-details with --output-file keeps every request",
    "--plot-throughput": "--plot FILE.html draws it",
    "--top-logprobs-num": f"{_BODY} '{{\"top_logprobs_num\": 3}}'",
    "--token-ids-logprob": f"{_BODY} '{{\"token_ids_logprob\": [1, 2]}}'",
    "--logprob-start-len": f"{_BODY} '{{\"logprob_start_len\": 0}}'",
    "--return-routed-experts": "the server does not return them",
    "--random-image-count": "every request has --image-count images",
    "--profile-prefill-url": _WORKERS,
    "--profile-decode-url": _WORKERS,
    "--gsp-num-turns": "every request is one turn; mooncake has sessions",
    "--gsp-send-routing-key": "--header X-SMG-Routing-Key=KEY gives all requests one key",
    "--gsp-fast-prepare": "leave it out: the statistics are cheap",
    "--speed-bench-category": _SPEED,
    "--speed-bench-output-len": _SPEED,
    "--agentic-max-turns": "--dataset-name mooncake has sessions",
    "--dataset-offset": "another --seed draws other lines",
    "--fake-prefill": "a decode server computes the prompts that no other server sends",
}
"""Flag -> why, and what to use instead."""


def add_profile_options(group: Any) -> None:
    """Details of --profile: fields of /start_profile."""
    group.add_argument(
        "--profile-activities", nargs="+", metavar="NAME", help="CPU, GPU, MEM (CPU and GPU)"
    )
    number = {"type": int, "metavar": "N"}
    group.add_argument("--profile-start-step", help="begin after so many steps", **number)
    group.add_argument(
        "--profile-num-steps", "--profile-steps", help="end after so many steps", **number
    )
    group.add_argument("--profile-by-stage", action="store_true", help="prefill, decode apart")
    group.add_argument("--profile-stages", nargs="+", metavar="NAME", help="prefill, decode")
    group.add_argument("--profile-output-dir", metavar="FOLDER", help="on the server")
    group.add_argument("--profile-prefix", metavar="TEXT", help="begin of the files' names")


def profile_body(args: argparse.Namespace) -> dict[str, Any]:
    """The body of /start_profile."""
    fields = {
        "activities": args.profile_activities,
        "start_step": args.profile_start_step,
        "num_steps": args.profile_num_steps,
        "profile_by_stage": args.profile_by_stage or None,
        "profile_stages": args.profile_stages,
        "output_dir": args.profile_output_dir,
        "profile_prefix": args.profile_prefix,
    }
    return {name: value for name, value in fields.items() if value is not None}


def headers_of(items: Sequence[str]) -> dict[str, str]:
    """The headers of ``NAME=VALUE``; ConfigError for another form."""
    headers = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise ConfigError(f"--header {item!r}: expected NAME=VALUE, such as X-Team=blue")
        headers[name] = value
    return headers


async def wait_ready(client: HttpClient, timeout_s: float) -> None:
    """Until /health answers 200, or TransferError after ``timeout_s``; 0 does not ask."""
    until_s = time.monotonic() + timeout_s
    while timeout_s > 0:
        try:
            status = (await client.ask("GET", "/health")).status
        except TransferError:
            status = 0
        if status == 200:
            return
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TransferError(f"{client.base_url} is not ready after {timeout_s:g} s")
        await asyncio.sleep(min(_POLL_S, left_s))
