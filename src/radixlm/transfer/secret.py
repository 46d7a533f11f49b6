"""The secret of the transfer protocol, and the address at which a server may listen with it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from radixlm.base.env import HOST_IP
from radixlm.base.errors import ConfigError
from radixlm.wire.cluster_socket import read_secret

LOOPBACK = "127.0.0.1"


def transfer_secret(cluster_secret_file: str | None) -> bytes:
    """Of --cluster-secret-file; without one, a secret of this user on this host."""
    text = read_secret(cluster_secret_file) if cluster_secret_file else _secret_of_user()
    return hashlib.sha256(b"radixlm transfer" + text.encode()).digest()


def listen_address(cluster_secret_file: str | None, host: str) -> str:
    """Where peers reach this server: only on this host, unless there is a secret that other hosts
    may know. ``host``: of --host."""
    if not cluster_secret_file:
        return LOOPBACK
    if HOST_IP.get():
        return HOST_IP.get()
    if host not in ("0.0.0.0", "::", "localhost", LOOPBACK):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("203.0.113.1", 9)
            )  # sends nothing; tells the address of the default route
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def _secret_of_user() -> str:
    """A file that only this user can read, made by the first server that needs it."""
    path = Path(tempfile.gettempdir()) / f".radixlm-transfer-{os.getuid()}"
    fresh = Path(tempfile.mkdtemp(prefix=".radixlm-")) / "secret"
    fresh.write_text(secrets.token_hex(32))
    fresh.chmod(0o600)
    with contextlib.suppress(FileExistsError):
        os.link(fresh, path)  # whole, or not at all
    fresh.unlink()
    fresh.parent.rmdir()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --cluster-secret-file FILE works") from error
    with open(descriptor, encoding="ascii") as file:
        facts = os.fstat(file.fileno())
        is_ours = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
        if not is_ours or not stat.S_ISREG(facts.st_mode):
            raise ConfigError(
                f"{path}: another user has made or can read it; --cluster-secret-file FILE works"
            )
        return file.read().strip()
