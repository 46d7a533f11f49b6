"""What --use-ray needs before Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.launch import engine_for_program
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.ray_nodes import _secret_file
from radixlm.engine.run_folder import RunFolder


def test_the_secret_is_private_and_goes_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = RunFolder()
    (killed.path / "secret").write_text("old")
    killed.remove()
    killed.path.mkdir()  # as a kill leaves it: with its lock free
    (killed.path / "lock").touch()
    with _secret_file("correct horse battery staple") as name:
        path = Path(name)
        assert path.read_text() == "correct horse battery staple"
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert list(tmp_path.iterdir()) == [path.parent]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "asked",
    [
        {"use_ray": True},
        {"node_rank": 1, "dist_init_addr": "h:1", "cluster_secret_file": "f"},
    ],
)
def test_a_program_without_a_server_starts_no_agents(asked: dict[str, Any]) -> None:
    config, info = ServerConfig.from_kwargs(model_path="m", tp_size=2, nnodes=2, **asked), Any
    with pytest.raises(ConfigError, match=r"--node-rank and --use-ray .* what works: node 0 here"):
        engine_for_program(config, frozenset(asked), cast(ModelInfo, info), None)
