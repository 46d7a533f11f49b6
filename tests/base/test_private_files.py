"""Secrets come from files that nobody else can read."""

import os
from pathlib import Path

import pytest

from radixlm.base.errors import ConfigError
from radixlm.base.private_files import read_secret


def test_a_secret_is_read_only_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(path)
    path.write_bytes(b"two words\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"two words"
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(path)


def test_a_group_may_read_a_secret_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"words")
    facts = path.stat()
    for mode, owner, user, is_read in (
        (0o440, 0, 1000, True),
        (0o444, 0, 1000, False),
        (0o460, 0, 1000, False),
        (0o440, 0, 0, False),
        (0o440, 1000, 1000, False),
    ):
        found = os.stat_result((mode, *facts[1:4], owner, *facts[5:]))
        monkeypatch.setattr("os.fstat", lambda _, found=found: found)
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        if is_read:
            assert read_secret(path) == b"words"
            continue
        with pytest.raises(ConfigError, match="chmod 600"):
            read_secret(path)
