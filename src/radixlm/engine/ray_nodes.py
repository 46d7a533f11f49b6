"""--use-ray: Ray places the agents of the other nodes as actors, and starts them again when they
die. An agent joins node 0 like any other (``engine/node_agent.py``); Ray carries no plan and no
tensor.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.lazy import require
from radixlm.base.log import set_up_logging
from radixlm.config.server_config import ServerConfig, engine_values
from radixlm.engine.node_agent import make_agent
from radixlm.engine.nodes import WAIT_S
from radixlm.engine.run_folder import RunFolder, remove_stale
from radixlm.wire.cluster_socket import read_secret

log = logging.getLogger(__name__)


@contextmanager
def _secret_file(secret: str) -> Iterator[str]:
    """A file that holds the secret, in a folder of mode 0700; those of killed processes go."""
    remove_stale()
    folder = RunFolder()
    try:
        (folder.path / "secret").write_text(secret)
        yield str(folder.path / "secret")
    finally:
        folder.remove()


class AgentActor:
    """What Ray runs on another node. Its ranks die with it."""

    def run(self, options: dict[str, Any], given: list[str], secret: str) -> int:
        """Serve until node 0 stops; ConfigError if it refuses this node."""
        with _secret_file(secret) as file:
            config = ServerConfig.from_kwargs(**options, cluster_secret_file=file)
            set_up_logging("agent", config.observe.log_level, log_format=config.observe.log_format)
            return make_agent(config, frozenset(given), -1).run()


@contextmanager
def placed_nodes(config: ServerConfig, given: frozenset[str]) -> Iterator[ServerConfig]:
    """Within it the agents of nodes 1, 2, ... run; the options with which node 0 meets them.
    ConfigError without Ray, without its cluster, or without room in it."""
    ray: Any = require("ray", "ray", "--use-ray")
    require("ray.util.placement_group", "ray", "--use-ray")
    p = config.parallel
    try:
        # RAY_ADDRESS, else the cluster that runs on this machine
        ray.init(address="auto", namespace="radixlm", log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"--use-ray: {error}; `ray start --head` starts a cluster") from error
    here = ray.util.get_node_ip_address()
    address = p.dist_init_addr or f"{here}:{_free_port(here)}"
    secret = read_secret(p.cluster_secret_file) if p.cluster_secret_file else secrets.token_hex(32)
    group = _placement_group(ray, here, p.nnodes, p.dist_timeout or WAIT_S)
    set_ = {"dist_init_addr": address, "use_ray": False}
    sent = engine_values(config.with_values(set_))
    for name in {"cluster_secret_file", "cpu_threads"} - (given & {"cpu_threads"}):
        sent.pop(name, None)  # of each node
    actors = [_start(ray, group, index) for index in range(1, p.nnodes)]
    runs = [actor.run.remote(sent, sorted(given), secret) for actor in actors]
    threading.Thread(target=_watch, args=(ray, runs), name="ray agents", daemon=True).start()
    try:
        with _secret_file(secret) as file:
            yield config.with_values({**set_, "cluster_secret_file": file})
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)
        ray.shutdown()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _placement_group(ray: Any, here: str, nnodes: int, timeout_s: float) -> Any:
    """A bundle for each node, on machines of their own as far as there are; the first here."""
    bundles = [{"CPU": 1.0} for _ in range(nnodes)]
    bundles[0][f"node:{here}"] = 0.001
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    if not group.wait(timeout_s):
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"--use-ray --nnodes {nnodes}: the Ray cluster has had no room for {nnodes} bundles of "
            f"one CPU for {timeout_s:g} s; it has {ray.available_resources()}"
        )
    return group


def _start(ray: Any, group: Any, index: int) -> Any:
    """An actor in bundle ``index``, which Ray starts again, and its call of ``run`` too."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(AgentActor).options(scheduling_strategy=strategy, **options).remote()


def _watch(ray: Any, runs: Sequence[Any]) -> None:
    """Log why an agent has ended."""
    waiting = list(runs)
    while waiting:
        done, waiting = ray.wait(waiting)
        for run in done:
            try:
                ray.get(run)
            except ray.exceptions.RayTaskError as error:
                log.error("an agent placed by Ray: %s", error.cause)
            except ray.exceptions.RayError:  # the server stops
                return
