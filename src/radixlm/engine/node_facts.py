"""What a node tells the others about itself when it joins a replica."""

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

from radixlm import __version__
from radixlm.base.cores import num_cores
from radixlm.base.errors import CheckpointError
from radixlm.config.server_config import ServerConfig
from radixlm.wire.cluster import NodeFacts

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16
# options that cut the model: ranks with other values could not meet
SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes")


def node_facts(config: ServerConfig, path: Path, address: str) -> NodeFacts:
    """The facts of this machine. ``path``: the model's folder or file; ``address``: its own."""
    return NodeFacts(
        host=socket.gethostname(),
        version=__version__,
        checkpoint=checkpoint_digest(path),
        path=str(path),
        address=address,
        sizes={name: config.value(name) for name in SIZES},
        num_cpus=num_cores(),
    )


def checkpoint_digest(path: Path) -> str:
    """16 hex digits of SHA-256 over names, sizes and samples of the files, without hidden ones and
    READMEs. Of a large file 16 pieces of 64 KiB are read, its header and its end among them."""
    digest = hashlib.sha256()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    try:
        for file in files:
            if file.is_file() and not file.name.startswith(".") and file.suffix != ".md":
                size = file.stat().st_size
                digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
                for piece in _samples(file, size):
                    digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _samples(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        if size <= NUM_SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
        for i in range(NUM_SAMPLES):
            opened.seek((size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)


def difference(mine: NodeFacts, theirs: NodeFacts) -> str:
    """Why a node with ``theirs`` cannot join node 0 with ``mine``, both values named; "" if it
    can."""
    if theirs.version != mine.version:
        return (
            f"{theirs.host} runs RadixLM {theirs.version}, node 0 on {mine.host} runs "
            f"{mine.version}: install the same version"
        )
    for name, value in mine.sizes.items():
        other = theirs.sizes.get(name, value)
        if other != value:
            flag = f"--{name.replace('_', '-')}"
            return (
                f"{flag} is {other} on {theirs.host} and {value} on node 0 ({mine.host}): all "
                "nodes take the same options but for --node-rank"
            )
    if theirs.checkpoint != mine.checkpoint:
        return (
            f"the checkpoint at {theirs.path} on {theirs.host} has digest {theirs.checkpoint}, "
            f"that at {mine.path} on node 0 ({mine.host}) {mine.checkpoint}: copy the same files "
            "to both"
        )
    return ""
