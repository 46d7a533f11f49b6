"""The recorder of a model's experts, from the options."""

from __future__ import annotations

from radixlm.base import env
from radixlm.base.errors import ConfigError
from radixlm.config.parallel import ParallelConfig
from radixlm.config.server_config import ServerConfig
from radixlm.distributed.balance import trivial
from radixlm.distributed.groups import Ranks
from radixlm.distributed.record import DEFAULT_STEPS, ExpertRecorder, RecorderOptions
from radixlm.models.build import Model, mixtures_of


def records_experts(parallel: ParallelConfig) -> bool:
    """Whether a recorder sees the steps."""
    return bool(
        parallel.expert_distribution_recorder_mode or parallel.enable_expert_distribution_metrics
    )


def make_recorder(config: ServerConfig, model: Model, ranks: Ranks) -> ExpertRecorder | None:
    """The recorder that the options ask for; ConfigError for models without experts."""
    parallel = config.parallel
    if not records_experts(parallel):
        return None
    mixtures, mode = mixtures_of(model), parallel.expert_distribution_recorder_mode
    if not mixtures:
        flag = "--expert-distribution-recorder-mode" if mode else ""
        flag = flag or "--enable-expert-distribution-metrics"
        raise ConfigError(f"{flag}: the model has no experts that can be recorded; leave it out")
    num_experts = max(layer.spec.experts for layer in mixtures)
    options = RecorderOptions(
        mode or "",
        parallel.expert_distribution_recorder_buffer_size or DEFAULT_STEPS,
        ranks.tp.size,
        env.EXPERT_RECORDER_DIR.get(),
        is_always_on=parallel.enable_expert_distribution_metrics,
        is_first=ranks.place.rank == 0,
    )
    return ExpertRecorder(mixtures, trivial(len(mixtures), num_experts, num_experts), options)
