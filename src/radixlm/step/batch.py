"""ForwardBatch: the tensors of one step. The executor makes them from a StepPlan; layers, attention
backends and models read them.

Legend: T packed tokens of the step, S sequences, P pages a sequence at most, G KV groups,
R rows whose logits are wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from radixlm.base.record import Record


class AttentionSite(Record):
    """One attention layer as its backend sees it.

    ``group`` selects page table and pool (0 full, 1 window); ``layer`` is the row of the pool.
    ``v_dim`` < ``head_dim`` with ``latent`` means that V is the first v_dim channels of K (MLA).
    """

    layer: int
    group: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None  # [heads]
    latent: bool = False
    chunk: int = 0  # a token sees only its own chunk of so many positions
    slopes: Tensor | None = None  # float32 [heads]: slope * (key - query position) joins a score
    stores: bool = True  # False: reads what another layer has stored
    looks_ahead: bool = (
        True  # False: causal even in the runs of ``ForwardBatch.bidirectional_spans``
    )


class AttentionRunner(Protocol):
    """What a layer calls: stores k, v of the step's tokens, then attends over the paged cache.

    ``pools`` (a ``pools.pool.KvPool`` a group) are for layers that read the cache themselves."""

    pools: Sequence[Any]

    def run(
        self, q_THD: Tensor, k_TKD: Tensor | None, v_TKV: Tensor | None, site: AttentionSite
    ) -> Tensor:
        """Causal attention of the step's tokens over their sequences; [T, heads * v_dim].

        K is None where the site stores nothing, V where it is latent."""


class FusedAttentionRunner(AttentionRunner, Protocol):
    """A runner that also applies the norms and the rotation of q and k and stores K and V, in one
    launch."""

    def prepare_and_run(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKV: Tensor,
        site: AttentionSite,
        norm: Any,
        cos_sin_T2R: Tensor | None,
        interleaved: bool,
    ) -> Tensor:
        """``prepare_qk`` of the kernels (``norm`` is its ``QkNorm``, q and k change in place), then
        ``run``."""


@dataclass(slots=True)
class InputEmbeds:
    """Rows that replace the embedding table's for the tokens of ``mask_T`` (None: for all)."""

    rows_TD: Tensor
    mask_T: Tensor | None = None  # bool


@dataclass(slots=True)
class MediaInputs:
    """What the media of a step bring besides input embeddings.

    mask_T                 bool: the placeholder tokens of media
    deepstack_LTD          rows that are added to the hidden states behind the first L layers
    cross_attention_spans  layers.cross_attention.CrossAttentionSpan: tokens with images
    """

    mask_T: Tensor | None = None
    deepstack_LTD: Tensor | None = None
    cross_attention_spans: tuple[Any, ...] = ()


class MRopeIds(Record):
    """Position ids of ropes with sections (M-RoPE), int64: time, row and column.

    ``of_sequence(n)``: the ids of all tokens of the step's n-th sequence, [3, N]; None without
    media in its prompt."""

    ids_3T: Tensor
    of_sequence: Callable[[int], Tensor | None]


@dataclass(slots=True)
class LayerScratch:
    """What layers leave for later layers of the same step; nobody else reads or writes it.

    per_layer_TLP   every layer's own input
    embeds_TD       the embeddings, for blocks that read them again
    router_TR       the hidden state of the last router, for the next of a chain
    deferred_TD     the output of a mixture of experts that is added a block later
    sums_TND        finished sums of branches, which later blocks read (Decoder.residual_sums)
    loop_start      the residual and the finished sums before a loop of layers (MessageLoop)
    loop_read       the same of the pass before, of which layers read messages
    chosen_tokens   tokens that the last indexer has chosen, by first row of a query chunk
    latents         rows [T, L + R] that layers keep for later ones, by the rotated channels R
    """

    per_layer_TLP: Tensor | None = None
    embeds_TD: Tensor | None = None
    router_TR: Tensor | None = None
    deferred_TD: Tensor | None = None
    sums_TND: Tensor | None = None
    loop_start: tuple[Tensor, Tensor] | None = None
    loop_read: tuple[Tensor, Tensor] | None = None
    chosen_tokens: dict[int, Tensor] = field(default_factory=dict)
    latents: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class ForwardBatch:
    """One step for the model. The sequences are packed one after another along T; parts that few
    steps have are records of their own, None otherwise.

    token_ids_T          int64
    positions_T          int64: position of the token in its sequence
    rope_len_T           int64: sequence length that a length-dependent rope uses for the token
    query_start_S1       int32 [S + 1]: first token of each sequence in the step
    kv_len_S             int32: tokens of the sequence, those of this step included
    page_table_GSP       int32 [S, P] for each group
    store_GT             int64 [T] for each group: where K and V of the token are stored, as
                         page * page_size + offset
    logits_rows_R        int64: indices into T
    prompt_len_S         int64: tokens of the sequence's prompt; None: not known
    is_decode            one token a sequence, an output token; ``max_kv_len`` is only an upper
                         bound then
    bidirectional_spans  (first token in T, count) of spans whose tokens attend to each other, in
                         order; a step never ends inside a span
    spans_ignore_window  tokens of a span see all of it in layers with a sliding window too; each
                         span then starts its sequence
    token_types_T        bool: tokens of the second text of a pair
    states               pools.state.StateStep of models with recurrent layers
    lora                 kernels.ops.lora.LoraRows of tokens that have adapters
    feature_data         what features have put into the plan (``extend`` hook)
    fused_attn           ``attn``, where it can prepare q and k in its own launch
    leaves_taps, taps_TN whether the model leaves what a drafter reads (``HiddenNeeds``); this
    carried              by name, what the pipeline stage before has left; empty in the first
    """

    token_ids_T: Tensor
    positions_T: Tensor
    rope_len_T: Tensor
    query_start_S1: Tensor
    kv_len_S: Tensor
    page_table_GSP: tuple[Tensor, ...]
    store_GT: tuple[Tensor, ...]
    logits_rows_R: Tensor
    attn: AttentionRunner
    max_query_len: int
    max_kv_len: int
    prompt_len_S: Tensor | None = None
    is_decode: bool = False
    bidirectional_spans: tuple[tuple[int, int], ...] = ()
    spans_ignore_window: bool = False
    embeds: InputEmbeds | None = None
    media: MediaInputs | None = None
    mrope: MRopeIds | None = None
    token_types_T: Tensor | None = None
    states: Any = None
    lora: Any = None
    feature_data: dict[str, Any] = field(default_factory=dict)
    fused_attn: FusedAttentionRunner | None = None
    leaves_taps: bool = True
    taps_TN: Tensor | None = None
    carried: dict[str, Tensor] = field(default_factory=dict)
    scratch: LayerScratch = field(default_factory=LayerScratch)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.kv_len_S.shape[0])

    def count_outputs(self, first: int = 0) -> np.ndarray:
        """How many of each sequence's tokens are output tokens, at positions from ``first`` on: its
        last ones; int64 [S]. What is computed of them does not depend on prompts' chunks."""
        if self.is_decode:
            first_S = np.full(self.num_sequences, first)
        elif self.prompt_len_S is None:
            return np.zeros(self.num_sequences, np.int64)
        else:
            first_S = np.maximum(self.prompt_len_S.cpu().numpy(), first)
        queries_S = np.diff(self.query_start_S1.cpu().numpy())
        count_S: np.ndarray = np.clip(self.kv_len_S.cpu().numpy() - first_S, 0, queries_S)
        return count_S

    @property
    def cross_attention_spans(self) -> tuple[Any, ...]:
        """Tokens with images to attend to, in the layers that do."""
        return self.media.cross_attention_spans if self.media is not None else ()

    @property
    def device(self) -> torch.device:
        return self.token_ids_T.device

    def add_embeds(self, dim: int) -> InputEmbeds:
        """``embeds``, made with rows of zeros and an empty mask if there are none yet."""
        if self.embeds is None:
            mask_T = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.device)
            rows_TD = torch.zeros(self.num_tokens, dim, device=self.device)
            self.embeds = InputEmbeds(rows_TD, mask_T)
        return self.embeds
