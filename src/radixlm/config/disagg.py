"""Prefill on one server, decode on another."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import POSITIVE, Flag, Group, no_op

_LEARNED = "both servers learn each other's ranks when they connect"

_PDMUX = (
    "CUDA green contexts, which divide a GPU's multiprocessors, and two steps at the same time; "
    "here prefill and decode share each step"
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DisaggConfig(Group):
    """Prefill/decode disaggregation."""

    disaggregation_mode: Annotated[
        str,
        "Role of this server: null (both), prefill or decode.",
        Flag(choices=("null", "prefill", "decode")),
    ] = "null"
    disaggregation_transfer_backend: Annotated[
        str,
        "How KV travels: auto (shared memory on one host, else TCP; mooncake, the default, is auto "
        "too), shm, tcp, mooncake_tcp (Mooncake's transfer engine), nixl (NIXL over UCX), or fake "
        "(it does not: each server computes for itself).",
        Flag(
            choices=(
                "auto",
                "shm",
                "tcp",
                "mooncake",
                "mooncake_tcp",
                "nixl",
                "ascend",
                "mori",
                "fake",
            ),
            built=("auto", "shm", "tcp", "mooncake", "mooncake_tcp", "nixl", "fake"),
            needs="an NPU or an AMD GPU",
            part_of=("disaggregation_mode",),
        ),
    ] = "mooncake"
    disaggregation_bootstrap_port: Annotated[
        int,
        "Port of the prefill server at which decode servers ask for its ranks.",
        Flag(within="[1, 65535]", part_of=("disaggregation_mode",)),
    ] = 8998
    disaggregation_decode_tp: Annotated[
        int | None, "Tensor-parallel ranks of the decode server.", no_op(_LEARNED, POSITIVE)
    ] = None
    disaggregation_decode_dp: Annotated[
        int | None, "Replicas of the decode server.", no_op(_LEARNED, POSITIVE)
    ] = None
    disaggregation_prefill_pp: Annotated[
        int, "Pipeline stages of the prefill server.", no_op(_LEARNED, POSITIVE)
    ] = 1
    disaggregation_ib_device: Annotated[
        str | None,
        "InfiniBand devices, with commas.",
        no_op("pages travel by shared memory or TCP"),
    ] = None
    num_reserved_decode_tokens: Annotated[
        int,
        "Tokens that a decode server keeps free for each request.",
        Flag(within="[0, inf)", part_of=("disaggregation_mode",)),
    ] = 512
    disaggregation_decode_polling_interval: Annotated[
        int,
        "Steps between two polls for arriving KV.",
        no_op("arrivals are told, not polled for", POSITIVE),
    ] = 1
    enable_pdmux: Annotated[
        bool, "Prefill and decode side by side on one GPU.", Flag(state="planned", needs=_PDMUX)
    ] = False
    sm_group_num: Annotated[
        int,
        "Groups of streaming multiprocessors.",
        Flag(within=POSITIVE, state="planned", needs=_PDMUX, part_of=("enable_pdmux",)),
    ] = 3
