"""Logit processors where they meet the loop: a request's custom_params are checked when it arrives.
What they do to logits is the sampler's business."""

from radixlm.sampling.processors import LogitProcessors
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.wire.requests import THINKING_BUDGET


class ProcessorFeature(Feature):
    """Hook arrive."""

    def __init__(self, processors: LogitProcessors) -> None:
        self._processors = processors

    def arrive(self, request: Request) -> bool:
        name = request.wire.processor
        if name is not None:
            self._processors.get(name).check(request.wire.sampling.custom_params)
        if request.wire.reasoning_bound is not None:
            self._processors.get(THINKING_BUDGET).check(request.wire.reasoning_bound)
        return False
