"""A scheduler with the features that have a place of their own in it."""

from __future__ import annotations

from radixlm.admission_order.ordered_queue import OrderedQueue
from radixlm.admission_order.preemption import PriorityPreemption
from radixlm.base import env
from radixlm.base.lazy import load
from radixlm.live_feed.tree_view import TreeView
from radixlm.operations.commands import OperatorCommands
from radixlm.operations.deadlines import RequestDeadlines
from radixlm.operations.step_log import LoadLog
from radixlm.parallel.stage_batches import StageBatches
from radixlm.scheduler.drafting import Drafting
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.interfaces import StepRecorder
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.scheduler.loop import Executor, Scheduler
from radixlm.self_check.kv_cache import SelfCheck
from radixlm.step_sizes.continuous_decoding import ContinuousDecoding
from radixlm.step_sizes.pacing import ChunkPacer
from radixlm.weight_updates.commands import WeightCommands
from radixlm.wire.channel import Channel

_FORCED = "radixlm.admission_order.forced_retraction:ForcedRetraction"


def make_scheduler(
    limits: Limits,
    executor: Executor,
    channel: Channel,
    kv_manager: KVCacheManager,
    hooks: Hooks,
    stream_interval: int,
    drafting: Drafting | None,
    recorder: StepRecorder | None,
) -> Scheduler:
    """A new scheduler, which has no requests."""
    queue = OrderedQueue(limits, kv_manager.prefix_cache)
    scheduler = Scheduler(
        limits,
        executor,
        channel,
        kv_manager,
        hooks,
        stream_interval,
        drafting=drafting,
        recorder=recorder,
        commands=(OperatorCommands, WeightCommands, TreeView, SelfCheck),
        pacer=ChunkPacer(limits.target_itl_s) if limits.target_itl_s != 0 else None,
        continuous=ContinuousDecoding(limits, kv_manager),
        queue=queue,
    )
    planner = scheduler.planner
    planner.preemption = PriorityPreemption(planner, queue)
    if env.TEST_RETRACT.get():
        sizes = env.TEST_RETRACT_INTERVAL.get(), env.TEST_RETRACT_NO_PREFILL_BS.get()
        planner.preemption = load(_FORCED)(planner, queue, *sizes)
    planner.stages = StageBatches(planner) if limits.stages > 1 else None
    scheduler.step_log, scheduler.deadlines = LoadLog(scheduler), RequestDeadlines(scheduler)
    return scheduler
