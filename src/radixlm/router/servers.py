"""Servers of this machine behind one gateway: ``radixlm router --launch-servers N``.

Flags are those of ``radixlm serve``; the gateway's carry the prefix ``--router-``, but for --host
and --port, which are the gateway's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from radixlm.base.addresses import url_host
from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from radixlm.base.record import replace
from radixlm.config.parser import OptionParser, argument_error, build_parser, collect
from radixlm.config.server_args import ServerArgs
from radixlm.engine.startup import check_parent, die_with_parent
from radixlm.router import launch
from radixlm.router.logs import set_up
from radixlm.router.options import Options, add_arguments, read, table
from radixlm.router.server_supervisor import Supervisor, send_signal

logger = logging.getLogger(__name__)

_PREFIX = "router_"
_END_S = 5.0
_OWN = ("host", "port", "worker_urls", "launch_servers")


def main(argv: Sequence[str]) -> int:
    """Start the servers, then the gateway; end both at SIGTERM. The exit status."""
    began_s = time.monotonic()
    options, server, num_servers = parse(argv)
    set_up_logging("router", options.log_level)
    set_up(options)
    if mp.get_start_method(allow_none=True) != "spawn":
        mp.set_start_method("spawn", force=True)  # CUDA does not survive a fork
    ports = find_available_ports(options.dp_worker_base_port, num_servers)
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    urls = tuple(f"http://{url_host(host)}:{port}" for port in ports)
    supervisor = Supervisor()
    try:
        for i, (port, url) in enumerate(zip(ports, urls, strict=True)):
            supervisor.launch(url, partial(launch_server_process, server, port, i))
        status = launch.run(replace(options, worker_urls=urls), began_s, supervisor.attach)
        return supervisor.status or status
    finally:
        cleanup_processes([one.process for one in supervisor.servers])


def parse(argv: Sequence[str]) -> tuple[Options, ServerArgs, int]:
    """(options of the gateway, arguments of each server, servers: --launch-servers or else
    --dp-size)."""
    parser = OptionParser(
        prog="radixlm router --launch-servers N",
        usage="%(prog)s [flags of radixlm serve] [--router-FLAG ...]",
    )
    add_arguments(parser, "router-", without=_OWN)
    parser.add_argument("--launch-servers", type=int, metavar="N", help="Servers to start.")
    try:
        known, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise argument_error(error, table()) from error
    own = parser._option_string_actions
    config, given = collect(build_parser("radixlm serve").read(rest, own))
    server = ServerArgs(**{name: config.value(name) for name in given})
    num_servers = known.launch_servers or config.parallel.dp_size
    if num_servers < 1:
        raise ConfigError("--launch-servers: at least 1 server; 2 works")
    raw = {name.removeprefix(_PREFIX): value for name, value in vars(known).items()}
    raw.pop("launch_servers", None)
    raw.setdefault("api_key", server.api_key)
    return read(raw | {"host": server.host, "port": server.port}), server, num_servers


def run_server(server_args: Any, dp_rank: int) -> None:
    """A server, in a process group of its own: Ctrl-C reaches the gateway alone, which ends it.
    Where the gateway is killed, the kernel ends it. SystemExit: it could not start, or failed."""
    os.setpgrp()
    die_with_parent()
    if (gateway := mp.parent_process()) is not None:
        check_parent(gateway.pid or 0)
    os.environ["SGLANG_DP_RANK"] = str(dp_rank)
    given = server_args.given()
    try:
        config = load("radixlm.config.server_config:ServerConfig").from_kwargs(**given)
        # the GPUs are our choice, and not worth a word where there are none
        status = load("radixlm.entrypoints.serve:serve")(config, frozenset(given) - {"base_gpu_id"})
    except (ConfigError, CheckpointError, TransferError) as error:
        print(f"radixlm: {error}", file=sys.stderr)
        status = 2
    if status:
        sys.exit(status)


def launch_server_process(server_args: Any, worker_port: int, dp_id: int) -> mp.Process:
    """Start server ``dp_id`` on ``worker_port``, with GPUs of its own."""
    own = copy.deepcopy(server_args)
    own.port = worker_port
    if dp_id:
        own.base_gpu_id = own.base_gpu_id + dp_id * own.tp_size
    own.dp_size = 1
    process = mp.Process(target=run_server, args=(own, dp_id))
    process.start()
    return process


def find_available_ports(base_port: int, count: int) -> list[int]:
    """Free ports from ``base_port`` on, apart by 100-1000: a server may use some above its own."""
    ports: list[int] = []
    port = base_port
    while len(ports) < count:
        if port > 65535:
            raise ConfigError(f"--router-dp-worker-base-port {base_port}: 31000 works")
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            ports.append(port)
        port += random.randint(100, 1000)
    return ports


def cleanup_processes(processes: Sequence[Any]) -> None:
    """End the servers with all their children: SIGTERM, and SIGKILL after 5 s."""
    for process in processes:
        send_signal(process, signal.SIGTERM)
    for process in processes:
        process.join(timeout=_END_S)
        if process.is_alive():
            logger.warning("server %d did not end within %g s: killed", process.pid, _END_S)
            send_signal(process, signal.SIGKILL)
