"""Secrets come from files that nobody else can read."""

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
