"""The scheduler's limits, computed from the options, the model and the pools."""

from __future__ import annotations

from radixlm.arch.spec import Attention, Decoder, Mlp, Moe, Rope
from radixlm.attention.double_sparsity import DoubleSparsity
from radixlm.base.env import MAX_OUTPUT_ESTIMATE, RUNNING_TIMEOUT_S
from radixlm.base.record import replace
from radixlm.config.observe import LOG_EVERY_S, LOG_STEPS
from radixlm.config.server_config import ServerConfig
from radixlm.engine.drafting import max_drafts, max_paths, tree_shape
from radixlm.engine.memory import Pools
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.rank_processes import topology_of
from radixlm.pools.capacity import STATES_PER_REQUEST
from radixlm.scheduler.limits import Limits, RopeLengths

# share of a running request's remaining output for which admission keeps room, at
# --schedule-conservativeness 1
BASE_RESERVE = 0.4


def limits_for_pools(pools: Pools, config: ServerConfig, info: ModelInfo) -> Limits:
    """The limits, with no more running requests than the state pool has states for."""
    limits = scheduler_limits(config, info, pools.num_tokens, pools.page_size)
    limits = replace(
        limits,
        kv_layout=f"{pools.dtype}, pages of {pools.page_size}",
        max_drafts=max_drafts(config, overlap_depth(config, info), info.decoder),
        max_paths=max_paths(tree_shape(config, info.decoder), limits.max_running),
    )
    if pools.states is None:
        return limits
    groups = topology_of(config).attn_dp
    max_running = groups * max(1, pools.sizes.num_window // STATES_PER_REQUEST)
    return replace(limits, max_running=min(limits.max_running, max_running))


def with_sparsity(limits: Limits, sparsity: DoubleSparsity | None) -> Limits:
    """The limits of an engine whose output tokens may be sparse: only dense ones are shared."""
    if sparsity is None:
        return limits
    layout = f"{limits.kv_layout}, labels {sparsity.digest}"
    return replace(limits, kv_layout=layout, first_sparse=sparsity.first_position)


def scheduler_limits(config: ServerConfig, info: ModelInfo, tokens: int, page_size: int) -> Limits:
    """The limits of a KV cache of ``tokens`` tokens."""
    schedule = config.schedule
    chunk = schedule.chunked_prefill_size or 2048
    is_encoder = info.decoder.encoder is not None
    is_whole = chunk < 0 or is_encoder
    budget = schedule.max_prefill_tokens if chunk < 0 else chunk
    # each attention group has as many
    max_running = _multiple(schedule.max_running_requests or 64, topology_of(config).attn_dp)
    stages = config.parallel.pp_size
    has_states = any(block.state is not None for block in info.decoder.blocks)
    micro_batch = config.parallel.max_micro_batch_size or max(1, max_running // stages)
    disagg = config.disagg
    reserved = disagg.num_reserved_decode_tokens
    return Limits(
        max_running=max_running,
        max_queued=schedule.max_queued_requests,
        step_tokens=max(budget, info.context_len) if is_whole else chunk,
        max_prefill_tokens=max(schedule.max_prefill_tokens, info.context_len if is_whole else 1),
        context_len=min(info.context_len, tokens),
        page_size=page_size,
        # the first stage has computed a step when its launch returns
        depth=max(overlap_depth(config, info), stages - 1),
        stages=stages,
        max_micro_batch=micro_batch if stages > 1 else None,
        waits_for_chunks=stages > 1 and has_states,
        target_itl_s=_target_itl_s(config),
        attention_length=attention_length(info.decoder) * (config.execute.device == "cpu"),
        admit_every=schedule.num_continuous_decode_steps or 1,
        max_passes=_max_passes(config, info),
        reserve=BASE_RESERVE * schedule.schedule_conservativeness,
        max_reserved=MAX_OUTPUT_ESTIMATE.get(),
        running_s=RUNNING_TIMEOUT_S.get(),
        reserved_tokens=reserved if disagg.disaggregation_mode == "decode" else 0,
        policy="fcfs" if schedule.schedule_policy == "priority" else schedule.schedule_policy,
        priorities=schedule.enable_priority_scheduling,
        low_values_first=schedule.schedule_low_priority_values_first,
        preemption_threshold=schedule.priority_scheduling_preemption_threshold,
        fair=True,
        chunked=not is_whole,
        is_encoder=is_encoder,
        eos_ids=info.eos_ids,
        vocab=info.decoder.vocab,
        rope=rope_lengths(info.ropes),
        weights_version=config.model.weight_version,
        log_interval=config.observe.decode_log_interval or 0,
        log_every_s=LOG_EVERY_S * (config.observe.decode_log_interval == LOG_STEPS),
    )


def _max_passes(config: ServerConfig, info: ModelInfo) -> int:
    """Tokens that a step decodes in turn: on a CPU by one rank, which knows what it has sampled. Of
    recurrent states, those behind a request's end could not be taken back."""
    has_states = any(block.state is not None for block in info.decoder.blocks)
    is_alone = topology_of(config).world == 1
    if config.execute.device != "cpu" or not is_alone or has_states:
        return 1
    return config.schedule.num_continuous_decode_steps or 0


def _target_itl_s(config: ServerConfig) -> float | None:
    """What a step may take in seconds, by --target-itl-ms: with stages, a request decodes in one of
    as many steps. Without it a CPU, whose chunks take long, spares readers."""
    target_ms, stages = config.schedule.target_itl_ms, config.parallel.pp_size
    is_open = config.execute.device == "cpu" and stages == 1
    return (None if is_open else 0.0) if target_ms is None else target_ms / 1e3 / stages


def attention_length(decoder: Decoder) -> float:
    """The context that costs a new token as many operations as the weights do, in tokens; 0 of a
    model whose layers do not read all of it."""
    weights, of_context = 0, 0
    for block in decoder.blocks:
        attention, ffn = block.attention, block.ffn
        if isinstance(attention, Attention):
            heads = attention.heads + attention.kv_heads
            weights += 2 * decoder.dim * heads * attention.head_dim
            sparse = attention.extras and (
                attention.extras.block_sparse or attention.extras.indexer
            )
            if not attention.window and not sparse:
                of_context += 2 * attention.heads * attention.head_dim
        if isinstance(ffn, Mlp):
            weights += (2 + ffn.gated) * decoder.dim * ffn.inner
        elif isinstance(ffn, Moe):
            inner = ffn.top_k * ffn.inner + (ffn.shared.inner if ffn.shared else 0)
            weights += (2 + ffn.gated) * decoder.dim * inner
    return weights / of_context if of_context else 0.0


def _multiple(number: int, factor: int) -> int:
    """``number`` rounded to a multiple of ``factor``, not to 0."""
    return max(1, number // factor) * factor


def overlap_depth(config: ServerConfig, info: ModelInfo) -> int:
    """Steps in flight while the next is planned: 0 on a CPU, which has computed a step when its
    launch returns, for recurrent layers, whose overlap is not tested, and with drafts, whose
    acceptance the next plan must know."""
    has_states = any(block.state is not None for block in info.decoder.blocks)
    has_drafts = config.speculate.speculative_algorithm is not None
    is_ahead = config.execute.device == "cuda" and not has_states and not has_drafts
    return int(is_ahead and not config.schedule.disable_overlap_schedule)


def rope_lengths(ropes: tuple[Rope, ...]) -> RopeLengths | None:
    """How KV depends on the length of its prompt, if a rope of the model depends on it."""
    for rope in ropes:
        if rope.depends_on_length and rope.scaling is not None:
            params = dict(rope.scaling.params)
            original = params.get("original_max_position_embeddings")
            original = original or params.get("max_position_embeddings")
            if isinstance(original, int | float):
                return RopeLengths(int(original), rope.scaling.kind == "dynamic")
    return None
