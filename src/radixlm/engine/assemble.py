"""Assemble one engine around what ``load_engine`` has loaded: executor, KV cache manager, features,
scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record, replace
from radixlm.config.server_config import ServerConfig
from radixlm.devices.cuda import CudaDevice
from radixlm.engine.drafting import corpus_commands, make_drafting, make_ngram
from radixlm.engine.features.page_arrivals import PageArrivals
from radixlm.engine.features.processors import ProcessorFeature
from radixlm.engine.gpu import record_graphs, warm_up
from radixlm.engine.hicache import write_policy
from radixlm.engine.kept import FIRST_BOOT, Boot
from radixlm.engine.kv_events import KvEvents
from radixlm.engine.load_engine import LoadedEngine, available_on, can_profile, load_engine
from radixlm.engine.model_cost import make_cost
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.parts import make_features, make_kv_manager, make_runner, tokenizer_loader
from radixlm.engine.peering import make_handover
from radixlm.engine.rank_processes import topology_of
from radixlm.engine.ranks import NO_PEERS, Peers
from radixlm.engine.scheduling import make_scheduler
from radixlm.engine.stores import store_secret
from radixlm.engine.torch_compile import compile_now
from radixlm.executor.runner import Runner
from radixlm.live_feed.step_recorder import StepRecorder
from radixlm.observe.ring import StepRing
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.scheduler.loop import Scheduler
from radixlm.wire.channel import Channel

# by which a start waits for pages of a tier on disk, so that the first prompts find them
MAX_PRELOAD_S = 2.0


class EngineCore(Record):
    """One assembled engine. ``facts`` go to intake when it is ready; ``renew`` makes another
    scheduler, which has no requests, for the same model and pools; ``close`` comes last."""

    scheduler: Scheduler
    facts: dict[str, Any]
    renew: Callable[[], Scheduler]
    close: Callable[[], None]


def new_runner(config: ServerConfig, info: ModelInfo, engine: LoadedEngine) -> Runner:
    """A runner with empty tables around a loaded model."""
    device, parts, limits = engine.device, engine.parts, engine.limits
    engine.controls.note_mapped(engine.packed.mapped_bytes)
    make = partial(make_runner, config, info, parts, device)
    if parts.steps is not None:
        compile_now(parts.steps, make, limits)
    if isinstance(device, CudaDevice) and can_profile(info, parts.model):
        warm_up(partial(make, limits), limits)
    runner = make(limits)
    if engine.pages is not None:
        engine.pages.begin(runner)
    record = partial(_record, config, engine, runner)
    record()
    engine.occupation.follow(runner.drop_graphs, record)
    return runner


def _record(config: ServerConfig, engine: LoadedEngine, runner: Runner) -> None:
    """Record steps as graphs, where the device has them."""
    profiler, device = engine.parts.profiler, engine.device
    if engine.graph_sizes.decodes and profiler is not None:
        free, began_s = available_on(device), time.perf_counter()
        with profiler.of_graphs(config.execute.enable_profile_cuda_graph):
            pads = not config.execute.disable_cuda_graph_padding
            record_graphs(runner, engine.graph_sizes, pads)
        engine.controls.note_graphs(free - available_on(device))
        engine.facts["graph_seconds"] = time.perf_counter() - began_s


def assemble(
    config: ServerConfig,
    info: ModelInfo,
    channel: Channel,
    extra_features: tuple[Feature, ...] = (),
    peers: Peers = NO_PEERS,
    boot: Boot = FIRST_BOOT,
    ring: StepRing | None = None,
) -> EngineCore:
    """Load the model and build everything around it; ConfigError or CheckpointError if it fails.
    ``ring``: takes records of the steps."""
    if peers.ranks.place != topology_of(config).place(0):
        raise ConfigError(
            "--tp-size, --pp-size: this program computes in one process; `radixlm serve` and "
            "`radixlm bench one-batch` start the other ranks"
        )
    ngram = make_ngram(config, info, tokenizer_loader(config, info))
    engine = load_engine(config, info, peers, corpus_commands(ngram), boot)
    limits, processors = engine.limits, ProcessorFeature(engine.parts.processors)
    events = KvEvents(config, engine.parts.pools.page_size, boot.replica, boot.number)
    pages = engine.pages
    arrivals = None
    if pages is not None:
        policy = write_policy(config.memory, pages.options.page_size)
        secret = store_secret(config)
        arrivals = PageArrivals(pages.manifest.digest, pages.options, policy, secret)
    own = make_features(config, info, limits, engine.loader)
    features = [*own, processors, events, *extra_features]
    features += make_cost(config, info.decoder, engine.parts, engine.facts["weight_bytes"])
    if engine.packed.writer is not None:
        features.append(engine.packed)
    handover = make_handover(pages.worker.tiers) if pages is not None else []
    hooks = Hooks(features if arrivals is None else (*features, arrivals, *handover))

    def make() -> Scheduler:
        executor = peers.executor(partial(new_runner, config, info, engine))
        kv_manager = make_kv_manager(config, engine.parts.pools, limits, events, engine.kept)
        if pages is not None and arrivals is not None:
            ports = pages.ports(executor)
            arrivals.bind(kv_manager, ports)
            for feature in handover:
                feature.bind(ports)
        drafting = make_drafting(config, limits, kv_manager, hooks, ngram)
        versioned = replace(limits, weights_version=engine.updater.namespace)
        interval = config.schedule.stream_interval
        parts = versioned, executor, channel, kv_manager, hooks, interval
        return make_scheduler(*parts, drafting, None if ring is None else StepRecorder(ring))

    scheduler = make()
    peers.agree(())  # all ranks are ready
    if arrivals is not None and not boot.number:  # else streams wait for the engine
        arrivals.preload(MAX_PRELOAD_S)

    def close() -> None:
        engine.packed.close()
        events.close()
        if pages is not None:
            pages.worker.close()  # writes what is due

    return EngineCore(scheduler, engine.facts, make, close)


def assemble_rank(
    config: ServerConfig, info: ModelInfo, peers: Peers, boot: Boot = FIRST_BOOT
) -> Callable[[], Runner]:
    """Load a rank that has no scheduler; what makes its runners."""
    engine = load_engine(config, info, peers, {}, boot)
    return partial(new_runner, config, info, engine)
