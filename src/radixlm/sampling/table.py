"""Sampling parameters by slot: small tables on the device, and flags on the host that say which
steps of the sampler a batch needs.

Legend: S slots, R rows of a step.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixlm.base.errors import InvalidRequest
from radixlm.kernels.cpu.sample import ROW
from radixlm.sampling.penalties import PenaltyCounts
from radixlm.sampling.processors import ChosenProcessor, NamedProcessor
from radixlm.wire.sampling_params import SamplingParams

TEMPERATURE, TOP_P, MIN_P = range(3)  # columns of the floats of rows
TOP_K, SEED = range(2)  # and of their integers

# the distribution is uniform long before; kernels compute in single precision
MAX_TEMPERATURE = 1e30


@dataclass(slots=True)
class SlotState:
    """One slot's parameters on the host. Tensors are on the device."""

    is_greedy: bool
    is_filtered: bool  # by top_k or top_p, which need tokens sorted by probability
    temperature: float
    top_k: int  # the vocabulary's size means no limit
    top_p: float
    min_p: float
    seed: int
    bias_ids: Tensor | None = None  # int64
    bias_values: Tensor | None = None  # fp32
    suppressed_ids: Tensor | None = None  # int64: EOS and stops, until suppressed_until
    suppressed_until: int = 0  # the first position where they are allowed
    processors: tuple[ChosenProcessor, ...] = ()
    rid: str = ""
    prompt_ids: Sequence[int] = ()  # these two are kept for processors only
    output_ids: list[int] = field(default_factory=list)

    @property
    def floats(self) -> tuple[float, ...]:
        """The real-valued parameters, in the order of the kernels' rows."""
        return self.temperature, self.top_p, self.min_p

    @property
    def changes_logits(self) -> bool:
        """Whether a step before the draw changes the slot's logits, apart from penalties."""
        return self.bias_ids is not None or self.suppressed_ids is not None or bool(self.processors)


class SamplingTable:
    """The sampling state of all slots of one executor. One thread owns it."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        random_seed: int | None = None,
    ) -> None:
        """``random_seed`` seeds the generator of seeds for requests without one."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.penalties = PenaltyCounts(vocab_size, self.device)
        self.states: list[SlotState | None] = [None] * num_slots
        # columns by slot: whether no step comes before the draw, whether there are penalties, a
        # logit processor, no draw (greedy); and the rows that C++ reads
        self.is_plain_S = np.ones(num_slots, np.bool_)
        self.has_penalties_S = np.zeros(num_slots, np.bool_)
        self.has_processor_S = np.zeros(num_slots, np.bool_)
        self.is_greedy_S = np.ones(num_slots, np.bool_)
        self.seeds_S = np.zeros(num_slots, np.int64)
        self.suppressed_until_S = np.zeros(num_slots, np.int64)
        self.rows_S = np.zeros(num_slots, ROW)
        self._random = random.Random(random_seed)

    def set(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        processor: NamedProcessor | None = None,
        rid: str = "",
        bound: ChosenProcessor | None = None,
    ) -> None:
        """Fill ``slot`` for a request: a new one, or one that comes back with ``output_ids``.

        ``processor`` has the custom_params of ``params``; ``bound`` comes after it.
        ``eos_ids`` are suppressed until min_new_tokens are generated. ``params`` were validated
        against the tokenizer; InvalidRequest here if a biased token lies beyond the model's
        vocabulary."""
        self.clear(slot)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        seed = params.sampling_seed
        if seed is None:
            seed = self._random.getrandbits(63)
        temperature = 1.0 if params.is_greedy else min(params.temperature, MAX_TEMPERATURE)
        chosen = () if processor is None else ((processor, params.custom_params),)
        state = SlotState(
            is_greedy=params.is_greedy,
            is_filtered=top_k < self.vocab_size or params.top_p < 1.0,
            temperature=temperature,
            top_k=top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
            processors=chosen if bound is None else (*chosen, bound),
            rid=rid,
        )
        if state.processors:
            state.prompt_ids, state.output_ids = prompt_ids, list(output_ids)
        self._set_bias(state, params)
        self._set_suppressed(state, params, len(prompt_ids), eos_ids)
        self.states[slot] = state
        if params.needs_penalties:
            self.penalties.set(
                slot,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
                prompt_ids,
                output_ids,
            )
        self._set_columns(slot, state)

    def _set_columns(self, slot: int, state: SlotState) -> None:
        self.has_penalties_S[slot] = slot in self.penalties
        self.is_plain_S[slot] = not (state.changes_logits or slot in self.penalties)
        self.has_processor_S[slot] = bool(state.processors)
        self.is_greedy_S[slot], self.seeds_S[slot] = state.is_greedy, state.seed
        self.suppressed_until_S[slot] = state.suppressed_until
        row = np.zeros((), ROW)
        row["top_k"], row["is_greedy"] = state.top_k, state.is_greedy
        row["temperature"], row["top_p"], row["min_p"] = state.temperature, state.top_p, state.min_p
        row["penalties"] = (1.0, 0.0, 0.0)
        if state.bias_ids is not None and state.bias_values is not None:
            row["bias_ids"], row["num_bias"] = state.bias_ids.data_ptr(), state.bias_ids.numel()
            row["bias_values"] = state.bias_values.data_ptr()
        if state.suppressed_ids is not None:
            row["suppressed"] = state.suppressed_ids.data_ptr()
            row["num_suppressed"] = state.suppressed_ids.numel()
        self.rows_S[slot] = row

    def parameters(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """On the device: float32 [R, 3] and int64 [R, 2] of these slots."""
        index_R = np.asarray(slots, np.intp)
        rows = self.rows_S[index_R]
        floats_R3 = np.stack([rows[name] for name in ("temperature", "top_p", "min_p")], 1)
        ints_R2 = np.stack([rows["top_k"], self.seeds_S[index_R]], 1)
        floats, ints = torch.from_numpy(floats_R3), torch.from_numpy(ints_R2)
        return self._to_device(floats), self._to_device(ints)

    def all_unscaled(self, slots: Sequence[int]) -> bool:
        """Whether the temperature of all these slots is 1."""
        return bool((self.rows_S["temperature"][np.asarray(slots, np.intp)] == 1.0).all())

    def _to_device(self, values: Tensor) -> Tensor:
        """Copy to the device without waiting for its queued steps."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def clear(self, slot: int) -> None:
        self.states[slot] = None
        self.penalties.clear(slot)

    def state(self, slot: int) -> SlotState:
        state = self.states[slot]
        assert state is not None, f"slot {slot} was not set"
        return state

    def _set_bias(self, state: SlotState, params: SamplingParams) -> None:
        if not params.logit_bias:
            return
        ids = list(params.logit_bias)
        if max(ids) >= self.vocab_size:
            raise InvalidRequest(
                f"logit_bias holds {max(ids)}, the model has {self.vocab_size} tokens", "logit_bias"
            )
        values = list(params.logit_bias.values())
        state.bias_ids = torch.tensor(ids, dtype=torch.int64, device=self.device)
        state.bias_values = torch.tensor(values, dtype=torch.float32, device=self.device)

    def _set_suppressed(
        self, state: SlotState, params: SamplingParams, prompt_len: int, eos_ids: Sequence[int]
    ) -> None:
        if params.min_new_tokens == 0:
            return
        ids = sorted({i for i in (*eos_ids, *params.stop_token_ids) if 0 <= i < self.vocab_size})
        state.suppressed_ids = torch.tensor(ids, dtype=torch.int64, device=self.device)
        state.suppressed_until = prompt_len + params.min_new_tokens
