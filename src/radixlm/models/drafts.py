"""Draft models: modules that guess further tokens from hidden states of a target model (EAGLE,
EAGLE-3, multi-token prediction), and models that draft by themselves.

The entry of token i in a draft's KV cache is made of its embedding and of the target's hidden state
of token i - 1, so it depends on no later token and shared pages fit every continuation. Published
code stores the same entry one place earlier; rotary positions are relative. Place 0 has no entry.

Legend: T packed tokens, R rows whose logits are wanted, D draft channels, N channels of the
target's hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from radixlm.arch.draft import Draft, at_step, num_streams, tapped_layers, taps_mean
from radixlm.arch.spec import Attention, Decoder, LatentAttention
from radixlm.base.record import Record, replace
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.layers.mixers import emit_mixer
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.program import (
    NOWHERE,
    ProgramBuilder,
    ProgramStream,
    Target,
    handles,
    struct,
)
from radixlm.layers.residual import added
from radixlm.layers.rope import Angles
from radixlm.models.decoder import DecoderModel
from radixlm.models.taps import HiddenNeeds
from radixlm.quant.param import Param
from radixlm.step.batch import ForwardBatch, InputEmbeds


class DraftOutput(Record, eq=False):
    """``logits_RV``: float32, of the draft's own vocabulary. ``hidden_RD``: what its next step
    reads in place of the target's hidden states; None for a model that drafts by itself."""

    logits_RV: Tensor
    hidden_RD: Tensor | None


def needs_of(spec: Draft, target: Decoder) -> HiddenNeeds:
    """The hidden states that a draft reads of this target."""
    layers = tapped_layers(spec, len(target.blocks))
    return HiddenNeeds(layers, not layers, taps_mean(spec))


class VocabMap(Module):
    """Draft token t is target token t + map[t]."""

    def __init__(self, size: int) -> None:
        self.weight = Param((size,), "int64")

    def finish(self) -> None:
        offsets_V = self.weight.take()
        self.targets_V = offsets_V + torch.arange(len(offsets_V), device=offsets_V.device)


class MaskHidden(Module):
    """What the places of masks have for hidden states of the target."""

    def __init__(self, width: int) -> None:
        self.weight = Param((width,))

    def finish(self) -> None:
        self.row_1N = self.weight.take()[None]


class DraftInputs(Module):
    """What comes before a draft's blocks; tensors have the roles "draft.*"."""

    embed_norm: NormLayer
    hidden_norm: NormLayer

    def __init__(self, spec: Draft, context: LayerContext) -> None:
        kernels, device, dim = context.kernels, context.device, spec.decoder.dim
        count = num_streams(spec.decoder)
        wide = count * dim if spec.norms_all_streams else dim
        for name, width in (("embed_norm", dim), ("hidden_norm", wide)):
            if (norm := getattr(spec, name)) is not None:
                setattr(self, name, NormLayer(norm, (width,), kernels, device))
        if count > 1 and spec.is_projected:
            self.join_embed, self.join_hidden = (context.linear(dim, dim) for _ in range(2))
        elif spec.is_projected:
            read = spec.target_dim if spec.reads_target else dim
            self.join = context.linear(2 * read, dim, spec.join_bias)
        if spec.taps:
            width = spec.taps * (spec.target_dim or dim)
            self.taps = context.linear(width, dim)
            if spec.taps_norm is not None:
                self.taps_norm = NormLayer(spec.taps_norm, (width,), kernels, device)
            if (norm := spec.tap_norm) is not None:
                each = width // spec.taps
                self.tap_norms = [
                    NormLayer(norm, (each,), kernels, device) for _ in range(spec.taps)
                ]
        if spec.mask is not None:
            self.mask_hidden = MaskHidden(max(spec.taps, 1) * (spec.target_dim or dim))
        if spec.has_vocab_map:
            self.vocab = VocabMap(spec.decoder.vocab)


class JointBlock(BlockLayer):
    """A block whose attention reads embedding and hidden state side by side. ``wide_TJ`` [T, 3 D]
    of the step: both as the attention reads them, then the residual."""

    mixer: AttentionLayer | LatentAttentionLayer

    def widen(self, dim: int, context: LayerContext, rope: int, place: tuple[int, int]) -> None:
        """Replace the attention by one that reads 2 D channels."""
        match self.spec.mixer:
            case Attention() as spec:
                self.mixer = AttentionLayer(spec, 2 * dim, context, rope, place, dim)
            case LatentAttention() as spec:
                self.mixer = LatentAttentionLayer(spec, 2 * dim, context, rope, place, dim)
            case other:
                raise AssertionError(f"no published head has {other}")

    def run_deferred(
        self,
        x_TD: Tensor,
        pending_TD: Tensor | None,
        batch: ForwardBatch,
        angles: Sequence[Angles],
    ) -> tuple[Tensor, Tensor | None]:
        """``x_TD`` is ``wide_TJ`` here."""
        dim = x_TD.shape[1] // 3
        both_TI, residual_TD = x_TD[:, : 2 * dim].contiguous(), x_TD[:, 2 * dim :].contiguous()
        mixed_TD = self.mixer.run(both_TI, batch, angles)
        return residual_TD, self.ffn.run(self.norm1.add_run(residual_TD, mixed_TD))

    def emit(self, program: ProgramBuilder, stream: ProgramStream, is_last: bool) -> None:
        """The same as operations; the stream's residual holds ``wide_TJ``."""
        handles(self.spec, "mixer", "ffn", "norm", "layout")
        dim, wide = program.dim, stream.residual
        index_J = torch.arange(3 * dim, dtype=torch.int32)
        program.keep.append(index_J)
        both, stream.residual = program.buffer("joint", 2 * dim), program.buffer("residual")
        for target, first, width in ((both, 0, 2 * dim), (stream.residual, 2 * dim, dim)):
            at = index_J.data_ptr() + 4 * first
            program.ops.columns(x=wide, y=target, index=at, dim=width, selected=False)
        branches = emit_mixer(self.mixer, program, both)
        if is_last:
            branches, _ = self._select(program, stream, branches, NOWHERE)
        selected = stream.selected
        program.add_branches(branches, Target(stream.residual, True, selected=selected))
        h = self.norm1.emit(program, stream.residual, program.buffer("h"), 0, selected)
        self._fed(program, self.ffn, h, 1.0).emit(Target(stream.residual, True, selected=selected))


class DraftModel(DecoderModel):
    """A module of a ``Draft`` record; ``bind`` lends it the token table and the head of its target,
    where it has none, once both are loaded."""

    inputs_kind: type[DraftInputs] = DraftInputs
    needs: HiddenNeeds | None
    _make_logits: Callable[[Tensor], Tensor]
    target_ids_V: Tensor | None  # int64: the target's token of each of the draft's; None: the same

    def __init__(
        self,
        spec: Draft,
        context: LayerContext,
        weight_dtype: torch.dtype | None,
        number: int = 0,
    ) -> None:
        """``number``: of the module, which guesses one token further than the one before it."""
        decoder = at_step(spec, number)
        self.spec = spec
        super().__init__(
            replace(decoder, tied=False, suppressed_tokens=(), max_positions=decoder.max_positions),
            context,
            weight_dtype,
            merge_windows=True,
        )
        if not spec.owns_table:
            del self.embed
        if not spec.owns_head:
            del self.head
        if not spec.decoder.norm.affine:
            del self.norm
        self.draft = self.inputs_kind(spec, context)

    def _block(self, layer: int, rope: int, place: tuple[int, int], state: int) -> BlockLayer:
        if layer or self.spec.is_projected:
            return super()._block(layer, rope, place, state)
        dim = self.decoder.dim
        block = JointBlock(self.decoder.blocks[0], dim, self.context, rope, place, state)
        block.widen(dim, self.context, rope, place)
        return block

    def finish(self) -> None:
        if self.spec.owns_head:
            self.packed_head, self._run_head = self.head.packed, self.head.packed.run
        self.program, self._program_backend = None, None

    def bind(self, target: DecoderModel, kept_ids_K: Tensor | None = None) -> None:
        """Use the token table and the head of ``target`` where the draft has none: of the head all,
        or the rows of the tokens ``kept_ids_K`` (int64)."""
        table = self.embed if self.spec.owns_table else target.embed
        self._embed_tokens, self._make_logits = table.run, self.logits
        if self.spec.has_vocab_map:
            kept_ids_K = self.draft.vocab.targets_V
        self.target_ids_V, head = kept_ids_K, target.decoder
        if not self.spec.owns_head:
            vocab = head.vocab if kept_ids_K is None else len(kept_ids_K)
            self.decoder = replace(
                self.decoder,
                vocab=vocab,
                logit_scale=head.logit_scale,
                logit_softcap=head.logit_softcap,
            )
            self._share_head(target, kept_ids_K)
        self.needs = needs_of(self.spec, head)

    def _share_head(self, target: DecoderModel, kept_ids_K: Tensor | None) -> None:
        self.packed_head, self._target_decoder = target.whole_head, target.decoder
        if kept_ids_K is None:
            self._make_logits = target.whole_logits
            return
        rows_KD = target.whole_head.unpack()[kept_ids_K].contiguous()
        packed = self.context.kernels.pack_linear(rows_KD, None, self.context.scheme.head_fmt)
        self.packed_head, self._run_head, self._target_decoder = packed, packed.run, self.decoder

    @property
    def mask(self) -> int | None:
        """The token that stands for drafts, where all are made in one step."""
        return self.spec.mask

    @property
    def mask_hidden_1N(self) -> Tensor:
        """What masks have for hidden states of the target."""
        return self.draft.mask_hidden.row_1N

    def combine(self, hidden_TN: Tensor) -> Tensor:
        """The target's hidden states as the module reads them: [T, D]."""
        if not self.spec.taps:
            return hidden_TN
        if self.spec.taps_norm is not None:
            hidden_TN = self.draft.taps_norm.run(hidden_TN)
        if self.spec.tap_norm is not None:
            taps = zip(self.draft.tap_norms, hidden_TN.chunk(self.spec.taps, -1), strict=True)
            hidden_TN = torch.cat([norm.run(part.contiguous()) for norm, part in taps], -1)
        return self.draft.taps.run(hidden_TN)

    def draft_step(
        self, batch: ForwardBatch, hidden_TD: Tensor | None, passes_all: bool = False
    ) -> DraftOutput:
        """The entries of the batch's tokens, of which ``hidden_TD`` are the hidden states before
        them; what follows the tokens of ``logits_rows_R``. ``passes_all``: the output's hidden
        states are of all tokens, [T, D]."""
        assert hidden_TD is not None
        batch.embeds = InputEmbeds(self._inputs(batch, hidden_TD))
        batch.attn.begin(batch)  # type: ignore[attr-defined]
        program, num_rows = self._program_for(batch), batch.logits_rows_R.shape[0]
        if passes_all:
            x_TD = self._stream(batch) if program is None else program.hidden(batch)
            if self.spec.passes_normed and program is None:
                x_TD = self._normed(x_TD)
            rows_RD = x_TD[batch.logits_rows_R]
            if not self.spec.passes_normed:
                rows_RD = self._normed(rows_RD)
            return DraftOutput(self._make_logits(rows_RD), x_TD.flatten(1))
        if program is not None and num_rows:
            hidden_RD, logits_RV = program.hidden_and_logits(batch)
            return DraftOutput(logits_RV, hidden_RD)
        x_RD = self._stream(batch)[batch.logits_rows_R]
        normed_RD = self._normed(x_RD)
        passed_RD = normed_RD if self.spec.passes_normed else x_RD.flatten(1)
        return DraftOutput(self._make_logits(normed_RD), passed_RD)

    def _normed(self, x_TD: Tensor) -> Tensor:
        """What the head reads: of several streams what their end makes of them."""
        if num_streams(self.spec.decoder) > 1:
            x_TD = self.streams.end(x_TD)
        return self.norm.run(x_TD) if self.spec.decoder.norm.affine else x_TD

    def _stream(self, batch: ForwardBatch) -> Tensor:
        """The residual stream behind the blocks, layer by layer: [T, D], or all streams."""
        assert batch.embeds is not None
        x_TD, pending_TD = batch.embeds.rows_TD, None
        angles = self.ropes.angles(batch)
        for block in self.blocks:
            x_TD, pending_TD = block.run_deferred(x_TD, pending_TD, batch, angles)
        return added(x_TD, pending_TD)

    def _inputs(self, batch: ForwardBatch, hidden_TD: Tensor) -> Tensor:
        """What the first block reads: [T, D], [T, 3 D] of a ``JointBlock``, or streams: [T, N, D],
        gated ones [T, N * D]."""
        spec, draft, has_streams = self.spec, self.draft, num_streams(self.spec.decoder) > 1
        embeds_TD = self._embed_tokens(batch.token_ids_T)
        if spec.blanks_first:
            embeds_TD = embeds_TD * (batch.positions_T != 1)[:, None].to(embeds_TD.dtype)
        hidden_TD = hidden_TD.to(embeds_TD.dtype)
        if has_streams and not spec.norms_all_streams:
            hidden_TD = hidden_TD.reshape(-1, self.decoder.dim)  # [T * N, D]
        if spec.embed_norm is not None:
            embeds_TD = draft.embed_norm.run(embeds_TD)
        normed_TD = draft.hidden_norm.run(hidden_TD) if spec.hidden_norm is not None else hidden_TD
        if has_streams:
            joined = draft.join_hidden.run(normed_TD.reshape(-1, self.decoder.dim))
            both_TND = joined.view(len(embeds_TD), -1, self.decoder.dim)
            both_TND = both_TND + draft.join_embed.run(embeds_TD)[:, None]
            return both_TND if spec.decoder.streams is not None else both_TND.flatten(1)
        if not spec.is_projected:
            residual_TD = normed_TD if spec.residual_is_normed else hidden_TD
            return torch.cat((embeds_TD, normed_TD, residual_TD), -1)
        parts = (embeds_TD, normed_TD)
        return draft.join.run(torch.cat(parts if spec.order == "embed hidden" else parts[::-1], -1))

    def emit(self, program: ProgramBuilder) -> None:
        """A step as operations of a C++ program; its inputs are the step's embeddings."""
        dim, spec = self.decoder.dim, self.spec
        head = self.decoder if spec.owns_head else self._target_decoder
        handles(
            head, "vocab", "dim", "blocks", "norm", "max_positions", "tied", "embed_scale",
            "positions", "logit_scale", "logit_softcap", "head_bias", "embed_norm",
            "embed_norm_text_only", "add_media_embeds", "deep_layers", "names", "extra_vocab_rows",
        )  # fmt: skip
        width = dim if spec.is_projected else 3 * dim
        stream = ProgramStream(program.buffer("residual" if width == dim else "wide", width))
        args = struct("EmbedArgs", vocab=0, dim=width)
        program.ops.embed(y=stream.residual, tied=None, args=args, replaced=True)
        for block in self.blocks:
            block.emit(program, stream, is_last=block is self.blocks[-1])
        final = stream.residual
        if spec.decoder.norm.affine:
            final = self.norm.emit(program, final, program.buffer("final"), 0, stream.selected)
        program.ops.hidden(x=final if spec.passes_normed else stream.residual, dim=dim)
        program.logits(
            self.packed_head, final, stream.selected, head.logit_scale, head.logit_softcap, NOWHERE
        )


class StandaloneDraft:
    """A causal language model that drafts by itself."""

    needs: HiddenNeeds | None = None
    target_ids_V: Tensor | None = None

    def __init__(self, model: DecoderModel, mask: int | None = None) -> None:
        """``mask``: the token that stands for drafts, where all are made in one step."""
        self.model, self.decoder, self.kv_groups = model, model.decoder, model.kv_groups
        self.mask = mask

    def combine(self, hidden_TN: Tensor) -> Tensor:
        """It reads no hidden states."""
        return hidden_TN

    def draft_step(
        self, batch: ForwardBatch, hidden_TD: Tensor | None, passes_all: bool = False
    ) -> DraftOutput:
        """KV of the batch's tokens, and what follows those of ``logits_rows_R``."""
        batch.attn.begin(batch)  # type: ignore[attr-defined]
        logits_RV = self.model.step(batch, False)[1]
        if logits_RV is None:
            logits_RV = torch.empty(0, self.decoder.vocab, device=batch.device)
        return DraftOutput(logits_RV, None)
