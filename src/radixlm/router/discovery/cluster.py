"""The Kubernetes API server: where it is, who asks, and its answers."""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from radixlm.base.addresses import url_host
from radixlm.base.errors import ConfigError, TransferError
from radixlm.router.call import Headers
from radixlm.router.exchange import Response
from radixlm.router.upstream import Upstream

POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster:
    """An API server. ``token_path`` is read at each request: tokens are renewed. ConfigError: a
    file cannot be used."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        token_path: Path | None = None,
        ca_path: str | None = None,
        cert_path: str | None = None,
        key_path: str | None = None,
    ) -> None:
        self.url = url
        self._token, self._token_path = token, token_path
        ca_paths = [ca_path] if ca_path else []
        try:
            self._upstream = Upstream(ca_paths=ca_paths, cert_path=cert_path, key_path=key_path)
        except ConfigError as error:
            problem = str(error).partition(" ")[2]  # without the flag of the workers' files
            raise ConfigError(f"--service-discovery: of {url}: {problem}") from error

    def _headers(self) -> Headers:
        token = self._token_path.read_text().strip() if self._token_path else self._token
        shown = [(b"authorization", f"Bearer {token}".encode())] if token else []
        return [*shown, (b"accept", b"application/json")]

    async def get(self, target: str, timeout_s: float) -> Response:
        """A whole answer; TransferError."""
        return await self._upstream.fetch(
            self.url, "GET", target, headers=self._headers(), timeout_s=timeout_s
        )

    async def lines(self, target: str, timeout_s: float, limit: int) -> AsyncIterator[bytes]:
        """The lines of an answer as they come. TransferError: it is none of 200, a line is longer
        than ``limit`` bytes."""
        exchange = await self._upstream.open(
            self.url, "GET", target, self._headers(), timeout_s=timeout_s
        )
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        exchange.start(queue.put_nowait)
        ended = asyncio.ensure_future(exchange.wait())
        ended.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            if exchange.status != 200:
                raise TransferError(f"the API server answers {exchange.status} to a watch")
            rest = b""
            while (data := await queue.get()) is not None:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > limit:
                    raise TransferError(f"the API server sent a line of more than {limit} bytes")
            await ended
        finally:
            exchange.close()
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def close(self) -> None:
        self._upstream.close()


def find_cluster(environment: Mapping[str, str] = os.environ, folder: Path = POD_FOLDER) -> Cluster:
    """The cluster that this pod runs in, else that of KUBECONFIG or ~/.kube/config. ConfigError:
    there is none."""
    host = environment.get("KUBERNETES_SERVICE_HOST")
    if host and (folder / "token").is_file():
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        ca_path = str(folder / "ca.crt")
        return Cluster(
            f"https://{url_host(host)}:{port}", token_path=folder / "token", ca_path=ca_path
        )
    path = Path(environment.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    if not path.is_file():
        raise ConfigError(
            f"--service-discovery: this is no pod with a service account, and {path} is no file; "
            "set KUBECONFIG"
        )
    try:
        return _of_config(yaml.safe_load(path.read_text()))
    except (KeyError, StopIteration, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--service-discovery: {path} is no kubeconfig: {error!r}") from error


def _of_config(config: Any) -> Cluster:
    """The current context of a kubeconfig: a token, or a client's certificate."""
    name = config["current-context"]
    context = next(c["context"] for c in config["contexts"] if c["name"] == name)
    cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
    user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
    if "exec" in user or "auth-provider" in user:
        raise ConfigError(
            "--service-discovery: the kubeconfig's user needs a program; one with token or "
            "client-certificate works"
        )
    token_file = user.get("tokenFile")
    with tempfile.TemporaryDirectory(prefix="radixlm-kube-") as folder:  # they are read at once
        return Cluster(
            str(cluster["server"]).rstrip("/"),
            token=user.get("token") or "",
            token_path=Path(token_file) if token_file else None,
            ca_path=_file(cluster, "certificate-authority", folder),
            cert_path=_file(user, "client-certificate", folder),
            key_path=_file(user, "client-key", folder),
        )


def _file(values: Mapping[str, Any], name: str, folder: str) -> str | None:
    """The path of a PEM file; ``name``-data is written to one in ``folder``."""
    if name in values:
        return str(values[name])
    data = values.get(f"{name}-data")
    if data is None:
        return None
    path = Path(folder, f"{name}.pem")
    path.write_bytes(base64.b64decode(data))
    return str(path)
