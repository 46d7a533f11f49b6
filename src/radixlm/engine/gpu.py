"""What assembly does only on a GPU: open it, profile the largest steps, warm up, record graphs."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from radixlm.arch import spec
from radixlm.attention.base import AttentionBackend
from radixlm.base.deferred import TORCH_SHAPES, run_deferred
from radixlm.base.errors import ConfigError, InvariantError
from radixlm.base.record import Record
from radixlm.base.units import format_bytes, format_seconds
from radixlm.config.parallel import ParallelConfig
from radixlm.config.server_config import ServerConfig
from radixlm.cuda_graphs.dummy_run import DummyRun
from radixlm.cuda_graphs.graphs import GraphSizes, StepGraphs, graph_sizes, prompt_sizes
from radixlm.cuda_graphs.recorded import RecordedSteps
from radixlm.devices.cuda import CudaDevice
from radixlm.devices.device import CpuDevice, Device
from radixlm.distributed.device_groups import on_device
from radixlm.distributed.groups import ALONE, Ranks
from radixlm.distributed.nccl import NcclComm
from radixlm.engine.experts import records_experts
from radixlm.engine.memory import is_out_of_memory
from radixlm.engine.offload import is_offloading
from radixlm.engine.rank_processes import topology_of
from radixlm.executor.runner import Runner
from radixlm.kernels.dispatch import REFERENCE, Kernels
from radixlm.lora.table import AdapterTable
from radixlm.models.build import Model
from radixlm.models.decoder import DecoderModel
from radixlm.scheduler.limits import Limits

log = logging.getLogger(__name__)

# share of the card that torch cannot use: fragmentation, libraries, growing buffers
SPARE_SHARE = 0.015
GRAPH_BYTES = 8 << 20  # driver memory of a graph, besides the memory of its step


def open_device(config: ServerConfig, rank: int = 0) -> Device:
    """The device of --device for a rank; ConfigError where there is none."""
    name = config.execute.device or "cpu"
    if name == "cpu":
        return CpuDevice()
    run_deferred(TORCH_SHAPES)  # libraries of GPUs may need all of torch
    p, topology = config.parallel, topology_of(config)
    number = topology.ranks_of(topology.node_of(rank)).index(rank)
    index = p.base_gpu_id + number * p.gpu_id_step
    return CudaDevice(index, config.execute.enable_cudagraph_gc)


def device_ranks(config: ServerConfig, ranks: Ranks, device: Device) -> Ranks:
    """``ranks`` whose groups exchange what lies on the device. All ranks call it at once."""
    if isinstance(device, CpuDevice) or ranks.place == ALONE.place:
        return ranks
    make = partial(NcclComm, where=device.where) if config.parallel.gpu_id_step else None
    return on_device(ranks, topology_of(config), device.where, make)


def why_no_graphs(
    config: ServerConfig, model: Model, attn: AttentionBackend, kernels: Kernels
) -> str:
    """Why decode steps cannot be recorded; "" if they can."""
    if config.execute.disable_cuda_graph:
        return "--disable-cuda-graph"
    if reason := _why_not_among_ranks(config.parallel):
        return reason
    if is_offloading(config):
        return "a graph cannot wait for weights that the step before it has begun to copy"
    if attn.name != "triton":
        return f"--attention-backend {attn.name} reads lengths on the host"
    if not isinstance(model, DecoderModel):
        return "the model is not a native decoder"
    if model.state_layers:
        return "recurrent layers get their rows from the host"
    if any(rope.depends_on_length for rope in model.ropes.ropes):
        return "a rope depends on lengths that are known on the host only"
    blocks = model.decoder.blocks
    has_experts = any(
        isinstance(b.ffn, spec.Moe) or b.deferred_moe or b.parallel_moe for b in blocks
    )
    if records_experts(config.parallel):
        return "experts are recorded after each step"
    if has_experts and kernels.chosen["pack_experts"] == REFERENCE:
        return "the reference kernels of mixtures of experts count tokens on the host"
    return next((why for block in blocks if (why := reads_on_host(block))), "")


def _why_not_among_ranks(parallel: ParallelConfig) -> str:
    """The same, of ranks."""
    if parallel.pp_size > 1:
        return "pipeline stages hand over through the host"
    if parallel.tp_size > 1 and not parallel.gpu_id_step:
        return "ranks that share a GPU exchange through the host"
    if parallel.enable_dp_attention:
        return "groups of data-parallel attention get their rows from the host"
    return ""


def reads_on_host(block: spec.Block) -> str:
    """Why a block needs device results on the host; "" if it does not."""
    attention = block.attention
    if isinstance(block.mixer, spec.CrossAttention) or block.cross is not None:
        return "the inputs of cross-attention are put together on the host"
    is_chosen = isinstance(attention, spec.CompressedSparseAttention) or (
        isinstance(attention, spec.LatentAttention) and attention.indexer is not None
    )
    extras = attention.extras if isinstance(attention, spec.Attention) else None
    if is_chosen or (
        extras is not None
        and (
            extras.block_sparse
            or extras.indexer
            or extras.dynamic_mask_topk
            or extras.dual_chunk
            or extras.alibi_of_root
            or extras.chunk_lookback
        )
    ):
        return "sparse attention layers gather what they read on the host"
    if extras is not None and extras.experts:
        return "attention experts get their tokens from the host"
    ffns = (block.ffn, block.deferred_moe, block.parallel_moe)
    moes = [f for f in ffns if isinstance(f, spec.Moe)]
    if any(moe.limit or moe.expert_norm or any(moe.softcaps) for moe in moes):
        return "experts with limits, caps or norms get their tokens from the host"
    if any(not moe.gated for moe in moes):  # see MoeLayer.finish
        return "experts without a kernel get their tokens from the host"
    if any(moe.zero_experts for moe in moes):
        return "routing with zero experts has no kernel"
    return ""


def sizes_of_graphs(
    config: ServerConfig, limits: Limits, attn: AttentionBackend, has_adapters: bool = False
) -> GraphSizes:
    """Steps that get a graph, by the options. Those with parts of prompts must be padded, and
    double sparsity needs their lengths."""
    execute, pads = config.execute, not config.execute.disable_cuda_graph_padding
    sizes = execute.cuda_graph_bs, execute.cuda_graph_max_bs
    decodes = graph_sizes(limits.max_running, *sizes, pads)
    if execute.disable_prefill_cuda_graph or not pads or attn.sparsity is not None:
        return GraphSizes(decodes, (), has_adapters)
    sizes = execute.cuda_graph_bs_prefill, execute.cuda_graph_max_bs_prefill
    return GraphSizes(decodes, prompt_sizes(limits.step_tokens, *sizes), has_adapters)


class StepProfile(Record):
    """Memory that the largest steps need, and memory for the graphs."""

    step_bytes: int
    graph_bytes: int

    def needed(self, total_bytes: int) -> int:
        """Bytes that weights and KV must leave free."""
        return self.step_bytes + self.graph_bytes + int(total_bytes * SPARE_SHARE)


def profile_steps(
    device: CudaDevice, make_runner: Callable[[], Runner], limits: Limits, sizes: GraphSizes
) -> StepProfile:
    """Run the largest steps with pools of one page; ConfigError if they do not fit."""
    runner = make_runner()
    try:
        dummy = DummyRun(runner, limits.max_running, limits.context_len)
        prompts, recorded = _peaks(device, dummy, limits, sizes)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"no memory for a step of {limits.step_tokens} tokens beside the weights: lower "
            f"--chunked-prefill-size or --max-running-requests ({limits.max_running})"
        ) from error
    device.empty_cache()
    num_graphs = len(sizes.decodes) * (1 + len(runner.draft_widths)) + len(sizes.prompts)
    num_graphs *= sizes.num_families
    graphs = recorded * sizes.num_families + GRAPH_BYTES * num_graphs
    log.info(
        "the largest step needs %s, at most %d graphs %s",
        format_bytes(prompts),
        num_graphs,
        format_bytes(graphs),
    )
    return StepProfile(prompts, graphs)


def _peaks(
    device: CudaDevice, dummy: DummyRun, limits: Limits, sizes: GraphSizes
) -> tuple[int, int]:
    """Peak bytes of a step full of prompt tokens or drafts, and of the largest recorded steps."""
    dummy.decodes(1)  # compiles kernels and initialises libraries
    prompts = device.peak_bytes(partial(dummy.prompts, limits.step_tokens))
    if limits.max_drafts:
        drafts = partial(dummy.drafts, limits.max_drafts, limits.step_tokens)
        prompts = max(prompts, device.peak_bytes(drafts))
    recorded = 0
    if sizes.decodes:
        recorded = device.peak_bytes(partial(dummy.decodes, max(sizes.decodes)))
    if sizes.prompts:  # with logits of their own
        recorded += device.peak_bytes(partial(dummy.prompts, max(sizes.prompts)))
    return prompts, recorded


def warm_up(make_runner: Callable[[], Runner], limits: Limits) -> None:
    """Run every kind of step before requests do: a compiler takes seconds, in which all running
    requests would wait."""
    started_s = time.perf_counter()
    runner = make_runner()
    dummy = DummyRun(runner, limits.max_running, limits.context_len)
    try:
        dummy.sizes(limits.step_tokens)
        dummy.sampling()
        dummy.page_copies()
        for count in range(1, 1 + limits.max_drafts):
            dummy.drafts(count, limits.step_tokens)
        if isinstance(runner.adapters, AdapterTable):
            with runner.adapters.empty_one() as adapter:
                dummy = DummyRun(make_runner(), limits.max_running, limits.context_len, adapter)
                dummy.sizes(limits.step_tokens)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        log.warning(
            "a step of %d tokens finds no memory: lower --chunked-prefill-size, "
            "--max-running-requests or --mem-fraction-static",
            limits.step_tokens,
        )
    log.info("warmed up every kind of step in %s", format_seconds(time.perf_counter() - started_s))


def record_graphs(runner: Runner, sizes: GraphSizes, pads: bool) -> None:
    """Record decode steps, with and without drafts, and small steps with parts of prompts; all of
    them once more with adapters. If that fails, steps run without graphs."""
    recorded = runner.recorded = RecordedSteps(runner)
    _record(runner, recorded, sizes, pads, "CUDA graphs")
    if sizes.has_adapters and recorded.add_adapters(sizes.max_tokens):
        _record(runner, recorded, sizes, pads, "CUDA graphs with adapters", is_adapted=True)


def _record(
    runner: Runner,
    recorded: RecordedSteps,
    sizes: GraphSizes,
    pads: bool,
    what: str,
    is_adapted: bool = False,
) -> None:
    graphs = StepGraphs(runner.device, sizes.decodes, pads)
    with _recording(what):
        recorded.capture(graphs, is_adapted=is_adapted)
        for width in runner.draft_widths:
            recorded.capture(graphs.fitting(width), width, is_adapted)
        if sizes.prompts:
            with _recording(f"{what} of prompts"):
                prompts = StepGraphs(runner.device, sizes.prompts)
                recorded.capture_prompts(prompts, is_adapted)


@contextmanager
def _recording(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, InvariantError) as error:
        if is_out_of_memory(error):
            raise ConfigError(
                "no memory for CUDA graphs: lower --cuda-graph-max-bs, --cuda-graph-max-bs-prefill "
                "or --mem-fraction-static"
            ) from error
        log.warning("%s could not be recorded, steps run without them: %s", what, error)
