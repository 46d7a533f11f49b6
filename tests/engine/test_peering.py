"""Where the ranks of a prefill server listen, and where they register."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.config.server_config import ServerConfig
from radixlm.distributed.topology import Place
from radixlm.engine import peering


@pytest.mark.parametrize(
    ("host", "rank", "listens", "registers"),
    [
        ("192.0.2.1", 0, "192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", 1, "127.0.0.1", "192.0.2.1"),  # 192.0.2.1 is node 0's
        ("0.0.0.0", 0, "0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", 1, "127.0.0.1", "127.0.0.9"),
    ],
)
def test_each_node_listens_at_an_address_of_its_own(
    host: str,
    rank: int,
    listens: str,
    registers: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("a secret of the cluster")
    (tmp_path / "secret").chmod(0o600)
    found: list[Any] = []
    monkeypatch.setattr(peering, "Outgoing", lambda *args, **more: found.append(args))
    monkeypatch.setattr(peering, "listen_address", lambda secret, host: host)
    config = ServerConfig.from_kwargs(
        host=host, tp_size=2, nnodes=2, dist_init_addr="127.0.0.9:5000",
        cluster_secret_file=str(tmp_path / "secret"), disaggregation_mode="prefill",
    )  # fmt: skip
    ranks = SimpleNamespace(place=Place(rank=rank, tp_rank=rank, tp=2))
    peering.make_peer(config, SimpleNamespace(), SimpleNamespace(ranks=ranks))  # type: ignore[arg-type]
    (args,) = found
    assert args[2:4] == (listens, (registers, 8998))
