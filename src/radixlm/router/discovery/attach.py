"""The sources of the options, as a part of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from radixlm.base.lazy import load
from radixlm.router.discovery.lists import WorkerFile
from radixlm.router.discovery.names import Names
from radixlm.router.discovery.source import Source

if TYPE_CHECKING:
    from radixlm.router.app import Gateway


def attach(gateway: Gateway) -> None:
    """Begin to look when the gateway starts. ConfigError: a source cannot be read."""
    options = gateway.options
    if options.service_discovery:
        source = Source("kubernetes", gateway)
        load("radixlm.router.discovery.kubernetes:watch_pods")(gateway, source)
    if options.discovery_dns:
        names = Names(options.discovery_dns, Source("dns", gateway))
        gateway.on_start.append(lambda: _begin(gateway, names))  # DNS may be slow to answer
        gateway.every(options.discovery_interval_secs, names.look)
    if options.discovery_file is not None:
        file = WorkerFile(Path(options.discovery_file), Source("file", gateway))
        gateway.on_start.append(file.read)
        gateway.every(options.discovery_interval_secs, file.look)


def _begin(gateway: Gateway, names: Names) -> None:
    gateway.spawn(names.look())
