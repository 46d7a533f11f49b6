"""What --use-ray needs before Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

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
