"""From a configuration to an intake with an engine behind it: a process of its own, or a
thread."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from radixlm.base.env import MAX_NEW_TOKENS_LIMIT, QUEUE_TIMEOUT_S
from radixlm.base.errors import CheckpointError, ConfigError, RadixError
from radixlm.base.lazy import load
from radixlm.config.adapters import read_lora_path
from radixlm.config.server_config import ServerConfig
from radixlm.engine.features.inflight_log import InflightLog
from radixlm.engine.intake import RegistryOptions, ServerIntake
from radixlm.engine.located import tokenizer_folder
from radixlm.engine.logit_processors import processor_targets
from radixlm.engine.model_info import ModelInfo, refuse_special_files
from radixlm.engine.supervisor import EngineListener, EngineSupervisor
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.observer import Observer
from radixlm.lora.registry import AdapterOptions
from radixlm.observe.ring import StepRing
from radixlm.text.tokenizer import Tokenizer, load_tokenizer
from radixlm.weight_updates.registry import WeightsOptions
from radixlm.wire.channel import MemoryChannel, ZmqChannel
from radixlm.wire.codec import intake_codec
from radixlm.wire.link import ThreadLink, ZmqLink
from radixlm.wire.replies import Failed, Ready
from radixlm.wire.requests import Shutdown

if TYPE_CHECKING:
    from radixlm.engine.scheduler_supervisor import SchedulerSupervisor

log = logging.getLogger(__name__)


def intake_tokenizer(config: ServerConfig, info: ModelInfo) -> Tokenizer | None:
    """The tokenizer of --tokenizer-path, None with --skip-tokenizer-init."""
    if config.model.skip_tokenizer_init:
        return None
    folder = tokenizer_folder(config, info.folder)
    if folder != info.folder and folder.exists():
        refuse_special_files(folder)
    found = load_tokenizer(folder, config.model.tokenizer_mode)
    encoder = info.decoder.encoder
    if encoder is not None and encoder.is_padded:
        found.pads_to = info.context_len
    return found


def intake_facts(config: ServerConfig, info: ModelInfo) -> IntakeFacts:
    """What intake checks requests against."""
    return IntakeFacts(
        vocab=info.decoder.vocab,
        context_len=info.context_len,
        allow_auto_truncate=config.serve.allow_auto_truncate,
        clamp_max_tokens=config.serve.clamp_max_tokens,
        max_new_tokens=MAX_NEW_TOKENS_LIMIT.get() or None,
        request_timeout_s=config.schedule.request_timeout_s,
        max_queue_time_s=QUEUE_TIMEOUT_S.get() or None,
        hidden_states_enabled=config.execute.enable_return_hidden_states,
        routed_shape=info.routed_shape if config.execute.enable_return_routed_experts else None,
        processors=tuple(sorted(processor_targets(config.grammar))),
        eos_ids=info.eos_ids,
        embed_dim=info.decoder.dim,
        max_queued=config.schedule.max_queued_requests,
        default_priority=config.schedule.default_priority_value,
        refuses_priorities=(
            config.schedule.abort_on_priority_when_disabled
            and not config.schedule.enable_priority_scheduling
        ),
        streaming_window=config.schedule.streaming_window or 0,
        streaming_sinks=config.schedule.streaming_sinks,
        max_sequences=config.serve.max_sequences_per_call,
        max_logprobs=config.serve.max_logprobs,
        stall_timeout_s=config.serve.stall_timeout_s,
        is_generation=info.is_generation,
    )


def registry_options(config: ServerConfig, info: ModelInfo) -> RegistryOptions:
    """What intake knows of adapters and weights when it starts."""
    weights = WeightsOptions(
        config.model.weight_version,
        str(info.folder),
        config.model.load_format,
        config.serve.tokenizer_worker_num > 1,
    )
    return RegistryOptions(adapter_options(config), weights)


def adapter_options(config: ServerConfig) -> AdapterOptions:
    """What intake knows of adapters when it starts."""
    adapters, most = config.adapters, config.adapters.max_loras_per_batch
    given = [read_lora_path(text) for text in adapters.lora_paths or ()]
    return AdapterOptions(
        is_enabled=adapters.enable_lora,
        initial=tuple((one.name, one.path, one.is_pinned) for one in given),
        download_dir=config.model.download_dir,
        max_loaded=adapters.max_loaded_loras,
        max_pinned=None if most is None else most - 1,
        served_name=config.serve.served_model_name or "",
        is_shared=config.serve.tokenizer_worker_num > 1,
    )


class ProcessEngine:
    """An engine in its own process, restarted when it dies; --dp-size of them that share the
    requests. Use inside an event loop."""

    def __init__(
        self,
        config: ServerConfig,
        given: frozenset[str],
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        observers: Iterable[Observer] = (),
    ) -> None:
        parallel = config.parallel
        self.supervisors = [
            EngineSupervisor(config, given, 1, i, info.folder) for i in range(parallel.num_replicas)
        ]
        channels = [ZmqChannel(s.addresses[0], intake_codec(), bind=True) for s in self.supervisors]
        self.intake = ServerIntake(
            tokenizer,
            intake_facts(config, info),
            [ZmqLink(channel) for channel in channels],
            observers,
            parallel.load_balance_method,
            registry_options(config, info),
        )
        self.intake.run_folders = tuple(supervisor.folder for supervisor in self.supervisors)
        for supervisor in self.supervisors:
            supervisor.weights = self.intake.weights.startup

    async def start(self) -> None:
        """Returns when the engine processes have been started, not when they are ready."""
        self.intake.start()
        for supervisor in self.supervisors:
            await supervisor.start(self._watcher(supervisor.index))

    def _watcher(self, index: int) -> EngineListener:
        intake = self.intake
        replica = intake.replicas[index]
        return EngineListener(
            lost=lambda poison_rid, why: intake.lose_engine(poison_rid, index, why),
            gave_up=lambda message: intake.give_up(Failed("EngineError", message), index),
            beat_s=lambda: replica.beat_s if replica.is_ready else 0.0,
        )

    async def stop(self) -> None:
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        self.intake.replicas.close()


class ThreadEngine:
    """An engine in a thread of this process: the offline API, tests, --engine-in-process."""

    def __init__(
        self,
        config: ServerConfig,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        observers: Iterable[Observer] = (),
        ring: StepRing | None = None,
    ) -> None:
        if ring is None and config.observe.enable_trace:
            ring = StepRing()  # the scheduler tells its moments only where it records steps
        self._config, self._info, self._ring = config, info, ring
        mine, self._theirs = MemoryChannel.pair()
        self.intake = ServerIntake(
            tokenizer,
            intake_facts(config, info),
            ThreadLink(mine),
            observers,
            options=registry_options(config, info),
        )
        if ring is not None:
            self.intake.rings = (ring,)
        self._thread: threading.Thread | None = None
        self._serving: SchedulerSupervisor | None = None

    async def start(self) -> None:
        """Returns at once; ``intake.ready`` is set when the model is loaded."""
        self.intake.start()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            assemble = load("radixlm.engine.assemble:assemble")
            flight = InflightLog()
            replica = assemble(self._config, self._info, self._theirs, (flight,), ring=self._ring)
            renewing = load("radixlm.engine.scheduler_supervisor:SchedulerSupervisor")
            self._serving = renewing(
                replica.scheduler, replica.renew, self._theirs, replica.facts, flight
            )
            self._theirs.send(Ready(replica.facts))
            self._serving.run()
            replica.close()
        except RadixError as error:
            self._theirs.send(Failed(type(error).__name__, str(error)))
        except Exception as error:
            log.exception("the engine thread failed")
            self._theirs.send(Failed("EngineError", f"{type(error).__name__}: {error}"))

    async def stop(self) -> None:
        self.intake.replicas.send(Shutdown())
        if self._thread is not None:
            deadline_s = time.monotonic() + 10
            while self._thread.is_alive() and time.monotonic() < deadline_s:
                self._thread.join(0.02)
        self.intake.replicas.close()


ProgramEngine = ProcessEngine | ThreadEngine


def engine_for_program(
    config: ServerConfig, given: frozenset[str], info: ModelInfo, tokenizer: Tokenizer | None
) -> ProgramEngine:
    """The engine of a program without a server: a thread, or processes where several are needed.
    ConfigError for what a server alone does."""
    if config.parallel.node_rank or (config.parallel.use_ray and config.parallel.nnodes > 1):
        raise ConfigError(
            "--node-rank and --use-ray start agents, which `radixlm serve` alone does; what works: "
            "node 0 here, `radixlm serve --node-rank 1` on another host"
        )
    if config.parallel.num_processes > 1 and not config.serve.engine_in_process:
        return ProcessEngine(config, given, info, tokenizer)
    if config.memory.warm_restart:
        raise ConfigError(
            "--warm-restart: the engine is a thread of this program and ends with it; `radixlm "
            "serve` keeps the KV cache of an engine that was killed"
        )
    return ThreadEngine(config, info, tokenizer)


async def start(engine: ProgramEngine) -> None:
    """Start an engine, and wait until it serves; its failure as the error that it was."""
    intake, failed = engine.intake, asyncio.Event()
    intake.on_failed = lambda failure: failed.set()
    await engine.start()
    waits = [asyncio.ensure_future(event.wait()) for event in (intake.ready, failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if intake.failure is not None:
        raise failure_error(intake.failure)


def failure_error(failure: Failed) -> RadixError:
    """The engine's failure as the error that it was."""
    kinds: dict[str, Any] = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
    found = kinds.get(failure.kind, RadixError)(failure.message)
    assert isinstance(found, RadixError)
    return found
