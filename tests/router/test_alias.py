"""The module names of sglang-router (compat/sglang_router), and servers started with a gateway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.server_args import ServerArgs
from radixlm.router import servers
from radixlm.router.options import Options, parse
from tests.router.processes import Process, free_port, mock_process

COMPAT = Path(__file__).parents[2] / "compat" / "sglang_router" / "src"


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(COMPAT))
    launcher = __import__("sglang_router.launch_router").launch_router
    yield launcher
    for name in [one for one in sys.modules if one.split(".")[0] == "sglang_router"]:
        del sys.modules[name]


LINES = (
    "",
    "--worker-urls http://a:1 http://b:2 --policy round_robin --log-level debug",
    "--pd-disaggregation --prefill http://p:1 9 --prefill http://q:1 --decode http://d:1",
    "--control-plane-api-keys 1:Me:admin:k:k --jwt-issuer i --jwt-audience a "
    "--jwt-role-mapping Boss=admin --tls-cert-path c --tls-key-path k",
    "--service-discovery --selector app=x env=y --request-id-headers x-a x-b",
    "--prometheus-duration-buckets 0.1 1 --cors-allowed-origins http://o --disable-retries",
)


@pytest.mark.parametrize("line", LINES)
def test_the_alias_reads_the_same_options(alias: Any, line: str) -> None:
    args = alias.parse_router_args(line.split())
    rust = alias.Router.from_args(args)._router
    assert rust.options == parse(line.split())


def test_a_router_args_made_by_hand_has_the_defaults(alias: Any) -> None:
    assert alias.Router.from_args(alias.RouterArgs())._router.options == Options()
    with pytest.raises(ValueError, match="--tls-key-path"):
        alias.Router.from_args(alias.RouterArgs(server_cert_path="c"))


def test_flags_with_the_prefix_are_read_beside_a_servers(alias: Any) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="h")
    parser.add_argument("--policy", default="of the server")
    alias.RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    read = parser.parse_args(["--router-policy", "random", "--worker-urls", "http://a:1"])
    args = alias.RouterArgs.from_cli_args(read, use_router_prefix=True)
    assert (args.policy, args.worker_urls, args.host) == ("random", ["http://a:1"], "h")


def test_the_launcher_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{COMPAT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    worker, port = mock_process(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", "-1", "--worker-urls", worker.url]
    gateway = None
    try:
        gateway = Process(command, f"http://127.0.0.1:{port}")
        assert gateway.ask("/workers")["total"] == 1
        assert gateway.end() == 0
    finally:
        worker.kill()
        if gateway is not None:
            gateway.kill()


@pytest.mark.parametrize(
    ("module", "line", "says"),
    [
        ("sglang_router.launch_router", "--policy best", "round_robin"),
        ("sglang_router.launch_router", "--pd-disaggregation --prefill http://a:1 x", "port: x"),
        ("sglang_router.launch_router", "--launch-servers 2", "radixlm router"),
        ("radixlm.launch_router", "--policy best", "round_robin"),
    ],
)
def test_a_wrong_flag_ends_with_2_and_no_traceback(module: str, line: str, says: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{COMPAT}{os.pathsep}{sys.path[0]}"}
    done = subprocess.run(
        [sys.executable, "-m", module, *line.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_servers_and_gateway_share_a_command_line() -> None:
    line = (
        "--launch-servers 3 --model-path m --port 7 --host 0.0.0.0 --tp-size 2 --api-key k "
        "--router-policy random --router-dp-worker-base-port 40000 --log-level debug"
    )
    options, server, num_servers = servers.parse(line.split())
    assert num_servers == 3 and (server.model_path, server.tp_size) == ("m", 2)
    assert (options.policy, options.host, options.port) == ("random", "0.0.0.0", 7)
    assert (options.dp_worker_base_port, options.api_key) == (40000, "k")
    assert (options.log_level, server.log_level) == ("info", "debug")
    assert servers.parse(["--launch-servers=0", "--dp-size", "2"])[2] == 2
    for wrong in ("--router-polcy random", "--router-policy best", "--launch-servers -1"):
        with pytest.raises(ConfigError):
            servers.parse(["--launch-servers", "1", *wrong.split()])


def test_ports_are_free_and_apart() -> None:
    ports = servers.find_available_ports(45000, 3)
    assert len({*ports}) == 3 and all(b - a >= 100 for a, b in pairwise(ports))
    with pytest.raises(ConfigError):
        servers.find_available_ports(65000, 50)


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append((pid, number)))
    ended = SimpleNamespace(pid=1, join=lambda timeout: None, is_alive=lambda: False)
    stuck = SimpleNamespace(pid=2, join=lambda timeout: None, is_alive=lambda: True)
    servers.cleanup_processes([ended, stuck])
    assert sent == [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGKILL)]


def test_a_server_without_a_group_yet_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "killpg", Mock(side_effect=ProcessLookupError))
    young = Mock(pid=3, is_alive=lambda: True)
    servers.cleanup_processes([young])
    assert [call[0] for call in young.method_calls] == ["terminate", "join", "kill"]


class _Process:
    """Stands for a process; keeps what it was started with."""

    made: ClassVar[list[_Process]] = []

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        self.target, self.args, self.pid, self.has_started = target, args, 0, False
        self.made.append(self)

    def start(self) -> None:
        self.has_started = True


def test_each_server_has_a_port_and_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Process, "made", [])
    monkeypatch.setattr(servers.mp, "Process", _Process)
    monkeypatch.setattr(servers.mp, "set_start_method", lambda *_, **__: None)
    monkeypatch.setattr(servers, "cleanup_processes", lambda processes: ended.extend(processes))
    monkeypatch.setattr(servers, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(servers.launch, "run", lambda options, *_: used.append(options) or 0)
    used: list[Options] = []
    ended: list[Any] = []
    line = "--launch-servers 2 --tp-size 2 --base-gpu-id 1 --host 0.0.0.0 --router-policy random"
    assert servers.main([*line.split(), "--router-dp-worker-base-port", "46000"]) == 0
    first, second = (process.args[0] for process in _Process.made)
    assert (first.base_gpu_id, second.base_gpu_id) == (1, 3)
    assert used[0].worker_urls == tuple(f"http://127.0.0.1:{one.port}" for one in (first, second))
    assert all(process.has_started for process in _Process.made) and ended == _Process.made
    assert first.host == "0.0.0.0" and used[0].policy == "random"


def test_a_server_serves_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Any, frozenset[str]]] = []
    bound: list[str] = []
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(servers, "die_with_parent", lambda: bound.append("to the gateway"))
    monkeypatch.setenv("SGLANG_DP_RANK", "")
    monkeypatch.setattr(
        "radixlm.entrypoints.serve.serve", lambda config, given: served.append((config, given))
    )
    servers.run_server(ServerArgs(port=7, page_size=16), 3)
    ((config, given),) = served
    assert (config.serve.port, config.memory.page_size, given) == (7, 16, {"port", "page_size"})
    assert os.environ["SGLANG_DP_RANK"] == "3" and bound


def test_a_server_that_cannot_start_says_why_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(servers, "die_with_parent", lambda: None)
    monkeypatch.setenv("SGLANG_DP_RANK", "")
    with pytest.raises(SystemExit) as ended:
        servers.run_server(ServerArgs(model_path="/nowhere"), 0)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("radixlm: --model-path '/nowhere'")


def test_servers_end_where_one_more_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = [Mock()], list[Any]()
    monkeypatch.setattr(
        servers, "launch_server_process", Mock(side_effect=[*started, OSError("no room")])
    )
    monkeypatch.setattr(servers.mp, "set_start_method", lambda *_, **__: None)
    monkeypatch.setattr(servers, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(servers, "cleanup_processes", ended.extend)
    with pytest.raises(OSError, match="no room"):
        servers.main(["--launch-servers", "2", "--router-dp-worker-base-port", "46000"])
    assert ended == started


@pytest.mark.usefixtures("alias")
def test_groups_of_options_are_read_as_flags() -> None:
    from sglang_router import sglang_router_rs as rs
    from sglang_router.router import build_control_plane_auth_config

    fields = {"jwt_issuer": "i", "jwt_audience": "a", "jwt_role_mapping": {"Boss": "admin"}}
    fields |= {"control_plane_api_keys": [("1", "Me", "k:k", "admin")]}
    auth = build_control_plane_auth_config(fields)
    assert auth is not None and auth.audit_enabled is False
    redis = rs.PyRedisConfig("redis://r", retention_days=None)
    router = rs.Router(
        control_plane_auth=auth,
        history_backend=rs.HistoryBackendType.Redis,
        redis_config=redis,
        oracle_config=None,
    )
    assert router.options == parse(
        "--control-plane-api-keys 1:Me:admin:k:k --jwt-issuer i --jwt-audience a "
        "--jwt-role-mapping Boss=admin --history-backend redis --redis-url redis://r "
        "--redis-retention-days -1".split()
    )
    oracle = rs.PyOracleConfig(username="u", password="p", connect_descriptor="d", pool_max=8)
    options = rs.Router(history_backend="oracle", oracle_config=oracle).options
    assert (options.oracle_username, options.oracle_pool_max) == ("u", 8)
    postgres = rs.PyPostgresConfig("postgres://p")
    options = rs.Router(history_backend="postgres", postgres_config=postgres).options
    assert options.postgres_db_url == "postgres://p"


@pytest.mark.usefixtures("alias")
def test_groups_of_options_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    from sglang_router import sglang_router_rs as rs
    from sglang_router.router import build_control_plane_auth_config

    assert build_control_plane_auth_config({"control_plane_audit_enabled": True}) is None
    assert build_control_plane_auth_config({"jwt_role_claim": "roles"}) is None
    assert not caplog.records
    assert build_control_plane_auth_config({"jwt_role_claim": "groups"}) is None
    assert "jwt_issuer/jwt_audience missing" in caplog.text
    with pytest.raises(ValueError, match="pool_min"):
        rs.PyOracleConfig(pool_min=0)
    with pytest.raises(ValueError, match="pool_max"):
        rs.PyOracleConfig(pool_min=5, pool_max=2)
