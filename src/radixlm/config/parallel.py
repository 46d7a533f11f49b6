"""Ranks, replicas, nodes and experts."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import ABOVE_ZERO, NON_NEGATIVE, POSITIVE, Flag, Group, no_op

_EP = "DeepEP, a library for GPUs"
_NO_OVERLAP = "ranks exchange by copies on the cores that compute: nothing could run beside them"
_COMM = "speeds up communication between GPUs; ranks use plain NCCL"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ParallelConfig(Group):
    """Parallelism."""

    @property
    def world_size(self) -> int:
        """Ranks of a replica."""
        return self.tp_size * self.pp_size

    @property
    def num_replicas(self) -> int:
        """Engines behind one server; with DP attention ``dp_size`` counts parts of one engine."""
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def num_processes(self) -> int:
        """Processes that share the cores and the memory of this host."""
        return self.num_replicas * max(1, self.world_size // self.nnodes)

    tp_size: Annotated[
        int, "Tensor-parallel ranks.", Flag(("--tensor-parallel-size", "--tp"), within=POSITIVE)
    ] = 1
    pp_size: Annotated[
        int, "Pipeline stages.", Flag(("--pipeline-parallel-size", "--pp"), within=POSITIVE)
    ] = 1
    rank_timeout_s: Annotated[
        float,
        "Seconds that a rank may be silent in a step until all ranks are replaced.",
        Flag(within=ABOVE_ZERO, part_of=("tp_size", "pp_size")),
    ] = 30.0
    max_micro_batch_size: Annotated[
        int | None,
        "Maximum number of requests in one micro batch of the pipeline; --max-running-requests "
        "divided by --pp-size unless given.",
        Flag(("--pp-max-micro-batch-size",), within=POSITIVE, part_of=("pp_size",)),
    ] = None
    dp_size: Annotated[
        int,
        "Replicas of the engine behind one server.",
        Flag(("--data-parallel-size", "--dp"), within=POSITIVE),
    ] = 1
    load_balance_method: Annotated[
        str,
        "How requests are distributed to replicas: in turn, or to the one that holds the fewest "
        "requests (shortest_queue) or tokens (minimum_tokens).",
        Flag(
            choices=("round_robin", "shortest_queue", "minimum_tokens"),
            old_values=(
                ("auto", "round_robin"),
                ("follow_bootstrap_room", "round_robin"),
                ("total_requests", "shortest_queue"),
                ("total_tokens", "minimum_tokens"),
            ),
        ),
    ] = "round_robin"
    load_watch_interval: Annotated[
        float,
        "Seconds between two checks of the load of the replicas.",
        no_op("the load of each replica is always known", ABOVE_ZERO),
    ] = 0.1
    prefill_round_robin_balance: Annotated[
        bool,
        "Distribute prefills in turn, so that decode servers find the replica.",
        no_op("prefill and decode are not split over servers"),
    ] = False
    enable_dp_attention: Annotated[
        bool,
        "Data-parallel attention: --dp-size groups of ranks attend to requests of their own, the "
        "other layers have the tokens of all.",
    ] = False
    enable_dp_lm_head: Annotated[
        bool,
        "Split the vocabulary inside the groups of data-parallel attention, each of which computes "
        "the logits of its own tokens.",
    ] = False
    nnodes: Annotated[int, "Hosts that share the ranks of a replica.", Flag(within=POSITIVE)] = 1
    node_rank: Annotated[
        int,
        "Number of this host. Node 0 serves; the others run ranks for it.",
        Flag(within=NON_NEGATIVE, part_of=("nnodes",)),
    ] = 0
    use_ray: Annotated[
        bool,
        "Have Ray place and restart the agents of the other hosts; --node-rank is not given then.",
        Flag(part_of=("nnodes",)),
    ] = False
    dist_init_addr: Annotated[
        str | None,
        "host:port of node 0, at which the other nodes join it.",
        Flag(("--nccl-init-addr",), part_of=("nnodes",)),
    ] = None
    cluster_secret_file: Annotated[
        str | None,
        "File with the secret that all nodes share, of at least 16 characters.",
        Flag(part_of=("nnodes",)),
    ] = None
    nccl_port: Annotated[
        int | None,
        "Port of the rendezvous of the ranks of one node.",
        no_op("ranks meet at --dist-init-addr", "[1, 65535]"),
    ] = None
    dist_timeout: Annotated[
        int | None,
        "Seconds that nodes wait for each other at the start; 300 when unset.",
        Flag(within=POSITIVE, part_of=("nnodes",)),
    ] = None
    base_gpu_id: Annotated[
        int, "GPU of the first replica.", Flag(within=NON_NEGATIVE, only_device="cuda")
    ] = 0
    gpu_id_step: Annotated[
        int,
        "Distance between the GPUs of two ranks or replicas; 0: they share one.",
        Flag(within=NON_NEGATIVE, only_device="cuda", part_of=("dp_size", "tp_size", "pp_size")),
    ] = 1
    enable_nccl_nvls: Annotated[bool, "NCCL NVLS for long prefills.", no_op(_COMM)] = False
    enable_symm_mem: Annotated[bool, "NCCL symmetric memory.", no_op(_COMM)] = False
    disable_custom_all_reduce: Annotated[bool, "Always reduce with NCCL.", no_op(_COMM)] = False
    enable_mscclpp: Annotated[bool, "mscclpp for small reductions.", no_op(_COMM)] = False
    enable_p2p_check: Annotated[bool, "Check that GPUs can read each other.", no_op(_COMM)] = False
    enable_flashinfer_allreduce_fusion: Annotated[
        bool, "Reduce and normalize in one kernel.", no_op(_COMM)
    ] = False
    enable_two_batch_overlap: Annotated[
        bool,
        "Overlap the communication of one half batch with the other half's work.",
        no_op(_NO_OVERLAP),
    ] = False
    tbo_token_distribution_threshold: Annotated[
        float,
        "Share of tokens at which two-batch overlap turns into two-chunk overlap; 0 never.",
        no_op(_NO_OVERLAP, "[0, 1]"),
    ] = 0.48
    ep_size: Annotated[
        int, "Expert-parallel ranks.", Flag(("--expert-parallel-size", "--ep"), within=POSITIVE)
    ] = 1
    moe_a2a_backend: Annotated[
        str,
        "All-to-all exchange between experts.",
        Flag(
            choices=(
                "none",
                "deepep",
                "mooncake",
                "nixl",
                "mori",
                "flashinfer",
                "megamoe",
                "pplx",
                "ascend_fuseep",
                "ascend_tp",
                "deepep_v2",
                "flashinfer_megamoe",
            ),
            built=("none",),
            needs="a library of such exchanges for GPUs; ranks exchange by their own collectives",
        ),
    ] = "none"
    deepep_mode: Annotated[
        str,
        "Mode of DeepEP; 'auto' is low_latency for decode and normal for prefill.",
        Flag(
            choices=("normal", "low_latency", "auto"),
            built=("auto",),
            needs=_EP,
            part_of=("moe_a2a_backend",),
        ),
    ] = "auto"
    deepep_config: Annotated[
        str | None,
        "DeepEP tuning: JSON or a file.",
        Flag(state="planned", needs=_EP, part_of=("moe_a2a_backend",)),
    ] = None
    moe_dense_tp_size: Annotated[
        int | None,
        "Ranks that share the dense MLPs of a mixture of experts: 1, each has them whole; all "
        "unless given.",
        Flag(within=POSITIVE, part_of=("tp_size",)),
    ] = None
    ep_num_redundant_experts: Annotated[
        int, "Places for copies of experts, besides one for each.", Flag(within=NON_NEGATIVE)
    ] = 0
    ep_dispatch_algorithm: Annotated[
        str | None,
        "Which copy of an expert a token uses: static, one for each rank; dynamic, drawn; fake "
        "draws the experts too, to measure balanced loads.",
        Flag(choices=("static", "dynamic", "fake")),
    ] = None
    init_expert_location: Annotated[
        str,
        "Placement of experts at start: trivial, or JSON or a JSON file with "
        "physical_to_logical_map or logical_count.",
    ] = "trivial"
    enable_eplb: Annotated[bool, "Rebalance experts while running."] = False
    eplb_algorithm: Annotated[
        str,
        "Algorithm that balances experts.",
        Flag(
            choices=("auto", "deepseek", "deepseek_hierarchical", "deepseek_vec"),
            part_of=("enable_eplb", "init_expert_location"),
        ),
    ] = "auto"
    eplb_rebalance_num_iterations: Annotated[
        int, "Steps between two rebalancings.", Flag(within=POSITIVE, part_of=("enable_eplb",))
    ] = 1000
    eplb_rebalance_layers_per_chunk: Annotated[
        int | None,
        "Layers that are moved in one step.",
        Flag(within=POSITIVE, part_of=("enable_eplb",)),
    ] = None
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float,
        "Rebalance only while the mean utilisation is below this.",
        Flag(within="[0, 1]", part_of=("enable_eplb",)),
    ] = 1.0
    expert_distribution_recorder_mode: Annotated[
        str | None,
        "What /start_expert_distribution_record records: tokens of each expert by step or by pass, "
        "or the experts of each token.",
        Flag(choices=("stat", "stat_approx", "per_pass", "per_token")),
    ] = None
    expert_distribution_recorder_buffer_size: Annotated[
        int | None,
        "Steps that the recorder keeps; -1 keeps all. 1000 unless given.",
        Flag(within="[-1, inf)", part_of=("expert_distribution_recorder_mode",)),
    ] = None
    enable_expert_distribution_metrics: Annotated[bool, "Metrics about the balance of experts."] = (
        False
    )
