"""Servers of stores, started for a test on a free port of the loopback and killed after it."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

START_S = 60.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def process(port: int, *command: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A server that accepts connections; killed at the end."""
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )
    try:
        end_s = time.monotonic() + START_S
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)) and probe.getsockname()[1] != port:
                    break  # a free port may be connected to itself
            if child.poll() is not None or time.monotonic() > end_s:
                pytest.fail(f"{command[0]} does not listen at {port}: {child.poll()}")
            time.sleep(0.02)  # for a port that opens: there is nothing to wait on
        yield child
    finally:
        child.kill()
        child.wait(10)


@contextmanager
def redis_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(url, process) of a redis-server without persistence."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server (Debian: redis-server)")
    port = free_port()
    words = f"--port {port} --bind 127.0.0.1 --save --appendonly no --daemonize no".split()
    with process(port, program, *words) as child:
        yield f"redis://127.0.0.1:{port}/0", child


@contextmanager
def s3_server() -> Iterator[str]:
    """Endpoint of moto's S3 with a bucket "pages"."""
    pytest.importorskip("moto", reason="moto is not installed (radixlm[dev])")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (radixlm[s3])")
    if importlib.util.find_spec("flask") is None:
        pytest.skip("moto's server needs flask (radixlm[dev])")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    program = "from moto.server import main; main()"
    words = (sys.executable, "-W", "ignore", "-c", program, "-H", "127.0.0.1", "-p", str(port))
    with process(port, *words):
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        client.create_bucket(Bucket="pages")
        client.close()
        yield url


@contextmanager
def mooncake_master() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(host:port, process) of a mooncake_master that holds no object back."""
    module = pytest.importorskip(
        "mooncake.store",
        reason="Mooncake is not installed (radixlm[mooncake], Debian: libibverbs1)",
    )
    program = os.path.join(os.path.dirname(module.__file__), "mooncake_master")
    port, metrics = free_port(), free_port()
    words = f"--rpc_port={port} --metrics_port={metrics} --default_kv_lease_ttl=1000".split()
    with process(port, program, *words) as child:
        yield f"127.0.0.1:{port}", child


@contextmanager
def lmcache_server() -> Iterator[str]:
    """URL of LMCache's own server; $LMCACHE_PATH names the folder it is installed in."""
    path = os.environ.get("LMCACHE_PATH")
    if path is None and importlib.util.find_spec("lmcache") is None:
        pytest.skip("LMCache is not installed (pip install --no-deps lmcache; LMCACHE_PATH=folder)")
    port = free_port()
    words = (sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port))
    environ = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
    environ |= {"PYTHONPATH": path} if path else {}
    with process(port, *words, env=environ):
        yield f"lm://127.0.0.1:{port}"
