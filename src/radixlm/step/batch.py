"""ForwardBatch: the tensors of one step, made from a StepPlan by the executor. The only tensors
that cross a floor.

Legend: T packed tokens of the step, S sequences, P pages a sequence at most, G KV groups,
R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        ...


class PreparingRunner(AttentionRunner, Protocol):
    """One that also does what comes before: norms and rotation of q and k and the store of K and V
    in one launch."""

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
        ...


@dataclass(slots=True, eq=False)
class EncoderOutput:
    """What layers that attend to an image need of it: ``rows()`` of its encoder, float32 [N, D], in
    ``num_tiles`` equal parts of which the first ``num_used_tiles`` show something; and what each
    layer
    has made of them."""

    rows: Callable[[], Tensor]
    num_used_tiles: int
    num_tiles: int
    made: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class CrossAttentionSpan(Record):
    """Tokens [first, first + count) of the step and the images that they see: their true rows, or
    all rows where the tokens stand ``before`` them."""

    first: int
    count: int
    images: tuple[EncoderOutput, ...]
    is_before: bool


@dataclass(slots=True)
class ForwardBatch:
    """One step for the model. Sequences are packed one after another along T.

    ``kv_len_S`` counts the sequence's tokens including those of this step; token t of sequence s
    has position ``positions_T[t]``; its K and V go to flat index ``store_GT[g, t]`` =
    page * page_size + offset of group g.
    ``rope_len_T`` is the sequence length that a length-dependent rope must use for the token.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    rope_len_T: Tensor  # int64
    query_start_S1: Tensor  # int32, [S + 1]
    kv_len_S: Tensor  # int32
    page_table_GSP: tuple[Tensor, ...]  # a group each: int32 [S, P]
    store_GT: tuple[Tensor, ...]  # a group each: int64 [T]
    logits_rows_R: Tensor  # int64, indices into T
    attn: AttentionRunner
    max_query_len: int
    max_kv_len: int
    embeds_TD: Tensor | None = None  # input embeddings that replace the table's where given
    embeds_mask_T: Tensor | None = None  # bool: rows of embeds_TD that count
    media_T: Tensor | None = None  # bool: the places of media, if the step has some
    second_T: Tensor | None = None  # bool: tokens of the second text of a pair, if there is one
    per_layer_TLP: Tensor | None = None  # each layer's own input, where models have some
    chosen: Any = None  # tokens that the last layer with an index has chosen, by sequence piece
    routed_TR: Tensor | None = None  # what a router of several layers hands to the next block's
    first_TD: Tensor | None = None  # the embeddings, where later blocks read them again
    side_TD: Tensor | None = None  # what one block leaves for the end of the next
    states: Any = None  # pools.state.StateStep of models with recurrent layers
    rope_ids_3T: Tensor | None = None  # int64: time, row and column for ropes with sections
    # of the n-th sequence of the step, if its prompt has media: those of all its tokens, [3, N]
    whole_rope_ids: Callable[[int], Tensor | None] | None = None
    deep_LTD: Tensor | None = None  # joins the stream behind L layers
    # runs (first token in T, count) whose tokens see one another forwards too (in the layers that
    # look ahead), in order; a run is never cut by the end of a step
    bidirectional_spans: tuple[tuple[int, int], ...] = ()
    cross_attention_spans: tuple[
        CrossAttentionSpan, ...
    ] = ()  # of the tokens whose prompts have images to attend to
    extras: dict[str, Any] = field(default_factory=dict)  # by slot, from the `extend` hook
    preparing: PreparingRunner | None = None  # ``attn``, where it is one
    is_decode: bool = False  # one token a sequence; the host knows no more than an upper length

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.kv_len_S.shape[0])

    @property
    def device(self) -> torch.device:
        return self.token_ids_T.device
