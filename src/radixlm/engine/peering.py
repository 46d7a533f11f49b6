"""The peer tier of an engine, from its options, and the feature that goes with it."""

from __future__ import annotations

import logging

from radixlm.base.env import TRANSFER_BUFFER_MB, TRANSFER_RETRY_S, TRANSFER_WAIT_S
from radixlm.config.server_config import ServerConfig
from radixlm.engine.features.handover import HandoverFeature
from radixlm.engine.rank_processes import topology_of
from radixlm.engine.ranks import Peers
from radixlm.tiers.base import Tier
from radixlm.tiers.manifest import Manifest
from radixlm.tiers.peer import Incoming, Outgoing, PeerOptions
from radixlm.transfer.bootstrap import Registration
from radixlm.transfer.client import Address
from radixlm.transfer.remote import REMOTE, open_remote
from radixlm.transfer.secret import LOOPBACK, listen_address, transfer_secret
from radixlm.wire.cluster_socket import local_address, split_address

log = logging.getLogger(__name__)

_ONLY = ("shm", "tcp", *REMOTE)  # the others: shared memory or TCP


def is_paired(config: ServerConfig) -> bool:
    """Whether this server shares requests with others and pages travel between them."""
    disagg = config.disagg
    is_one_of_two = disagg.disaggregation_mode != "null"
    return is_one_of_two and disagg.disaggregation_transfer_backend != "fake"


def make_peer(config: ServerConfig, manifest: Manifest, peers: Peers) -> list[Tier]:
    """The peer tier of this rank; none of a server that works alone."""
    if not is_paired(config):
        return []
    disagg, secret_file = config.disagg, config.parallel.cluster_secret_file
    backend, host = disagg.disaggregation_transfer_backend, config.serve.host
    topology, its = topology_of(config), peers.ranks.place
    is_elsewhere = topology.node_of(its.rank) != 0  # where --host may be no address
    if is_elsewhere:
        host = local_address(str(config.parallel.dist_init_addr))
    address = listen_address(secret_file, host)
    options = PeerOptions(
        transfer_secret(secret_file),
        (backend,) if backend in _ONLY else ("shm", "tcp"),
        TRANSFER_WAIT_S.get(),
        TRANSFER_RETRY_S.get(),
        memory=open_remote(backend, address),
    )
    if disagg.disaggregation_mode == "decode":
        return [Incoming(manifest, options)]

    def place(address: Address) -> Registration:
        return Registration(
            address,
            tp_rank=its.attn_tp_rank,
            tp_size=its.attn_tp,
            pp_rank=its.stage,
            pp_size=its.pp,
            dp_rank=its.attn_dp_rank if topology.attn_dp > 1 else peers.replica,
            dp_size=config.parallel.dp_size,
            page_size=manifest.page_size,
            kv_cache_dtype=config.memory.kv_cache_dtype,
        )

    return [
        Outgoing(
            manifest,
            options,
            address,
            (_bootstrap_host(config, is_elsewhere), disagg.disaggregation_bootstrap_port),
            place,
            TRANSFER_BUFFER_MB.get() << 20,
            knows_rooms=its.stage == its.attn_tp_rank == 0,
        )
    ]


def _bootstrap_host(config: ServerConfig, is_elsewhere: bool) -> str:
    """Where this server's own bootstrap service is: on node 0, at --host. ``is_elsewhere``: seen
    from another node."""
    host = config.serve.host
    if host in ("0.0.0.0", "::") and is_elsewhere:
        return split_address(str(config.parallel.dist_init_addr))[0]
    return LOOPBACK if host in ("0.0.0.0", "::", "localhost") else host


def make_handover(tiers: list[Tier]) -> list[HandoverFeature]:
    """The feature of rank 0; none without a peer tier."""
    found = [tier for tier in tiers if tier.name == "peer"]
    if not found:
        return []
    (tier,) = found
    return [HandoverFeature(tier.takes_puts, tier.stats)]
