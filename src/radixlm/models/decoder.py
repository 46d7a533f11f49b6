"""The decoder: the layers of a ``Decoder`` record.

Legend: T packed tokens, D model channels, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from radixlm.arch.spec import Block, CrossAttention, Decoder, Rope, RotatedLightning
from radixlm.base.errors import ConfigError
from radixlm.base.record import replace
from radixlm.distributed.groups import ALONE
from radixlm.kernels import cpu
from radixlm.kernels.cpu.checks import dtype_code
from radixlm.kernels.cpu.linear import act_code
from radixlm.kernels.ops.linear import PackedLinear, TiedTable
from radixlm.kernels.ops.lora import LoraRows
from radixlm.layers.altup import AltUpBlock, AltUpEnds, PerLayerInputsMaker
from radixlm.layers.block import BlockLayer
from radixlm.layers.compressed_attention import CompressedSparseAttentionLayer
from radixlm.layers.context import LayerContext
from radixlm.layers.cross_attention import EncoderDecoderBlock, GatedCrossBlock
from radixlm.layers.embedding import Affine, Embedding, sinusoids
from radixlm.layers.gated_hyper_connections import (
    GatedHyperConnectionBlock,
    GatedHyperConnectionEnds,
)
from radixlm.layers.hyper_connections import HyperConnectionBlock, HyperConnectionEnds
from radixlm.layers.linear import Adaptable, StepAdapters
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.placement import CutLinear, cut_table
from radixlm.layers.program import ProgramBuilder, ProgramStream, Unsupported, handles, struct
from radixlm.layers.residual import added
from radixlm.layers.residual_sums import (
    MessageReader,
    RepeatedBlock,
    SummingBlock,
    SumReader,
)
from radixlm.layers.rope import LearnedFrequencies, RopeTables
from radixlm.layers.shared_block import SharedBlockCaller, make_shared_blocks
from radixlm.models.continuation import Continuation
from radixlm.models.handed_rows import HandedRows
from radixlm.models.kv_groups import entry_places, kv_groups, local_decoder, pool_places, state_rows
from radixlm.models.program.step import StepProgram, make_program
from radixlm.models.recurrence import RecurrenceRunner
from radixlm.models.stages import RESIDUAL, LeftOutBlock, Pipeline, Stage, kept_of
from radixlm.models.taps import HiddenNeeds
from radixlm.models.weight_pager import WeightPager
from radixlm.step.batch import AttentionSite, ForwardBatch, InputEmbeds, MediaInputs
from radixlm.step.result import TARGETS

NOWHERE = (-1, -1)  # place in a pool of a layer that has none


def _filled(
    taps_TN: Tensor | None, parts: Sequence[Tensor | None], x_TD: Tensor, is_mean: bool
) -> Tensor:
    """What a drafter reads, with these parts of the width of x; None for other stages' parts.
    ``is_mean``: of each, as of x, the mean of its streams."""
    if is_mean:
        parts, x_TD = [None if part is None else part.mean(1) for part in parts], x_TD[:, 0]
    width = x_TD.flatten(1).shape[1]
    if taps_TN is None:
        taps_TN = x_TD.new_zeros(len(x_TD), len(parts) * width)
    for place, part in enumerate(parts):
        if part is not None:
            taps_TN[:, place * width : (place + 1) * width] = part.flatten(1)
    return taps_TN


def rope_of(block: Block) -> Rope | None:
    """The rotation of a block's attention."""
    if isinstance(block.mixer, RotatedLightning):
        return block.mixer.rope
    return None if block.attention is None else block.attention.rope


class DecoderModel(Module):
    """Embedding, blocks, final norm, head. Load weights, then ``finish``, then ``forward``."""

    pool: list[Module]  # layers of a pooling model's head, set by build_model
    gate: list[Module]
    taps: HiddenNeeds | None = None  # what each step leaves for a drafter; see ``tap``
    pager: WeightPager | None = None  # of weights that do not fit into memory

    def __init__(
        self,
        decoder: Decoder,
        context: LayerContext,
        weight_dtype: torch.dtype | None,
        merge_windows: bool,
        stage: Stage | None = None,
    ) -> None:
        """``stage``: the layers that this rank has, all unless given."""
        self.decoder, self.context, self.weight_dtype = decoder, context, weight_dtype
        count = len(decoder.blocks)
        self.stage = stage = stage or Stage(0, count, count)
        self.is_part = not (stage.is_first and stage.is_last)
        self.pipeline = Pipeline(context.ranks) if self.is_part else None
        self.handed = HandedRows(decoder) if self.is_part else None
        self.adapted: tuple[Adaptable, ...] = ()
        self.head_site = self.embed_site = -1
        self._step_adapters = StepAdapters()
        if context.attention_groups is not None:
            context.attention_groups.adapters = self._step_adapters
        is_cpu = cpu.available and context.device.type == "cpu"
        self.use_program = is_cpu
        # states and windows would share the second page space: then windows keep all tokens
        own = decoder.blocks[stage.first : stage.end]
        self.state_layers = tuple(b.state.states for b in own if b.state is not None)
        merge_windows = merge_windows or any(b.state is not None for b in decoder.blocks)
        self.kv_groups = stage.groups(kv_groups(local_decoder(decoder, context), merge_windows))
        kernels, device, dim = context.kernels, context.device, decoder.dim
        ropes = list(dict.fromkeys(rope for b in decoder.blocks if (rope := rope_of(b))))
        self.ropes = RopeTables(ropes, kernels, device)
        if self.ropes.learned:
            self.frequencies = LearnedFrequencies(self.ropes)
        tied_fmt = context.scheme.head_fmt if decoder.tied else None
        width, rows = decoder.embed_dim or dim, decoder.vocab + decoder.extra_vocab_rows
        if stage.is_first or (stage.is_last and decoder.tied):
            self.embed = Embedding(rows, width, context, decoder.embed_scale, tied_fmt)
        if stage.is_first:
            self._make_embedding(width)
        rope_ids = [ropes.index(rope) if (rope := rope_of(b)) else -1 for b in decoder.blocks]
        self.banks = make_shared_blocks(decoder.blocks, rope_ids, dim, context)
        self._make_blocks(rope_ids)
        self._make_ends()
        if stage.is_last or self._shares_head:
            self._make_head(width)

    @property
    def _shares_head(self) -> bool:
        """Whether the first stage needs the head for a drafter."""
        return self.stage.is_first and not self.context.cuts_output_head

    def _make_embedding(self, width: int) -> None:
        """What turns rows of the token table into the first block's input."""
        decoder, context, dim = self.decoder, self.context, self.decoder.dim
        if decoder.embed_dim:
            self.embed_in = context.plain_linear(width, dim)
        if decoder.positions is not None and not decoder.sinusoidal_positions:
            self.positions = Embedding(decoder.positions[0], dim, context)
        if decoder.embed_norm is not None:
            kernels, device = context.kernels, context.device
            self.embed_norm = NormLayer(decoder.embed_norm, (dim,), kernels, device)
        if decoder.embed_affine:
            self.embed_affine = Affine(dim)

    def _make_head(self, width: int) -> None:
        """What turns the last block's output into logits."""
        decoder, context, dim = self.decoder, self.context, self.decoder.dim
        kernels, device = context.kernels, context.device
        self.norm = NormLayer(decoder.norm, (dim,), kernels, device)
        if decoder.embed_dim:
            self.embed_out = context.plain_linear(dim, width)
        if decoder.head_layer is not None:
            before = decoder.head_layer
            self.head_dense = context.plain_linear(dim, dim, before.bias)
            self.head_norm = NormLayer(before.norm, (dim,), kernels, device)
        if not decoder.tied:
            self.head = context.head_linear(width, decoder.vocab, decoder.head_bias)

    def _make_blocks(self, rope_ids: list[int]) -> None:
        """``rope_ids``: which rope each layer has, -1 for none."""
        decoder = self.decoder
        places = self._places = pool_places(decoder, self.kv_groups)
        stage = self.stage
        states, layers = (
            state_rows(decoder, stage.first, stage.end),
            list(range(len(decoder.blocks))),
        )
        if decoder.cycles is not None:
            self.cycles = RecurrenceRunner(decoder.cycles, decoder.dim)
            layers = self.cycles.layers_with_weights()
        self.blocks = [
            self._block(i, rope_ids[i], places.get(i, NOWHERE), states.get(i, -1))
            if i in stage
            else LeftOutBlock()
            for i in layers
        ]
        for layer, place in entry_places(self.kv_groups).items():
            mixer = self.blocks[layer].mixer
            assert isinstance(mixer, CompressedSparseAttentionLayer)
            mixer.entry_place = place

    def _make_ends(self) -> None:
        """What runs before the first and after the last block of several residual streams."""
        decoder, context, dim = self.decoder, self.context, self.decoder.dim
        is_end = self.stage.is_first or self.stage.is_last
        if decoder.altup is not None and is_end:
            count = len(decoder.blocks)
            self.altup = AltUpEnds(decoder.altup, dim, count, decoder.norm, context)
        if decoder.streams is not None and is_end:
            self.streams: HyperConnectionEnds | GatedHyperConnectionEnds
            self.streams = HyperConnectionEnds(decoder.streams, dim, context)
        if decoder.gated_streams is not None and is_end:
            self.streams = GatedHyperConnectionEnds(decoder.gated_streams, dim, context)
        if decoder.residual_sums and self.stage.is_last:
            self.sums_end = SumReader(dim)
        if decoder.message_loop is not None:
            self.messages = MessageReader(dim, decoder.message_loop.size)
        if decoder.layer_inputs is not None:
            own, count = decoder.layer_inputs, len(decoder.blocks)
            if self.stage.is_first:
                self.inputs = PerLayerInputsMaker(own, dim, count, decoder.norm, context)
            for layer, made in enumerate(self.blocks):
                if layer in self.stage:
                    made.add_per_layer_input(own, layer, dim, context)

    def _block(self, layer: int, rope: int, place: tuple[int, int], state: int) -> BlockLayer:
        decoder, context = self.decoder, self.context
        spec, dim = decoder.blocks[layer], decoder.dim
        if isinstance(spec.mixer, CrossAttention):
            return GatedCrossBlock(spec, dim, context, layer)
        if spec.cross is not None:
            return EncoderDecoderBlock(spec, dim, context, rope, place, layer)
        if spec.shared_block is not None:
            return SharedBlockCaller(spec, dim, context, state)
        if decoder.altup is not None:
            return AltUpBlock(spec, decoder.altup, layer, dim, context, rope, place)
        if decoder.message_loop is not None and decoder.message_loop.is_repeated(layer):
            return RepeatedBlock(spec, place, state)
        if decoder.residual_sums:
            return SummingBlock(decoder, layer, context, place, state)
        if decoder.gated_streams is not None:
            gated = decoder.gated_streams
            return GatedHyperConnectionBlock(spec, gated, dim, context, rope, place, state)
        if decoder.streams is not None:
            return HyperConnectionBlock(spec, decoder.streams, dim, context, rope, place, state)
        return BlockLayer(spec, dim, context, rope, place, state)

    def finish(self) -> None:
        """After the loader has filled and finished every layer."""
        head: PackedLinear | TiedTable
        is_tied = self.stage.is_first and self.decoder.tied
        if self.stage.is_last or is_tied or self._shares_head:
            if self.decoder.tied:
                head = cut_table(self.embed.tied, self.decoder.vocab, self.context.head_group)
            else:
                head = self.head.packed
            self.packed_head, self._run_head = head, head.run
        # on the device: a list would be copied there in each step
        self._suppressed_tokens = torch.tensor(
            self.decoder.suppressed_tokens, device=self.context.device
        ).long()
        if self.decoder.cycles is not None:
            self.cycles.bind(self.blocks, self._places)
        for layer, block in enumerate(self.blocks):
            asks = self.decoder.blocks[layer].shared_block
            if asks is not None and isinstance(block, SharedBlockCaller):
                block.bind(self.banks[asks.bank].make_call(asks.call, self._places[layer]))
            if self.decoder.message_loop is not None and isinstance(block, RepeatedBlock):
                first = self.blocks[self.decoder.message_loop.stored(layer)]
                assert isinstance(first, SummingBlock)
                block.bind(first, self.messages)
        # Also after new weights were loaded: an old program knows the addresses of the old ones.
        self.program: StepProgram | None = None
        self._program_backend: object = None

    @property
    def whole_head(self) -> PackedLinear | TiedTable:
        """The head of all tokens, which a rank has where it is tied or was not to be cut."""
        return self.embed.tied if self.decoder.tied else self.packed_head

    def tap(self, needs: HiddenNeeds | None) -> None:
        """From now on each step leaves these hidden states in ``ForwardBatch.taps_TN``. ConfigError
        for those behind layers of models with several residual streams, except all streams behind
        hyper-connections, and their means."""
        decoder, layers = self.decoder, needs.layers if needs else ()
        has_streams = decoder.streams or decoder.gated_streams or decoder.residual_sums
        has_others = has_streams and layers != (len(decoder.blocks) - 1,)
        if needs is not None and needs.is_mean and decoder.streams is not None:
            has_others = False
        if layers and (decoder.altup or has_others or decoder.cycles):
            raise ConfigError(
                "--speculative-algorithm: heads cannot read the hidden states of this model, which "
                "has several residual streams; STANDALONE and NGRAM work"
            )
        self.taps, self.program, self._program_backend = needs, None, None
        if self.pipeline is not None:
            self.pipeline.has_taps = needs is not None

    @property
    def _reads_mean(self) -> bool:
        """Whether a drafter reads the means of the streams behind layers."""
        return self.taps is not None and self.taps.is_mean

    @property
    def sites(self) -> tuple[AttentionSite, ...]:
        """The site of each layer that attends, in order; known once the weights are loaded."""
        return tuple(site for block in self.blocks if (site := block.site) is not None)

    def emit(self, program: ProgramBuilder) -> None:
        """A step as operations of a C++ program. Unsupported where there is none for a part."""
        decoder = self.decoder
        handles(
            decoder, "vocab", "dim", "blocks", "norm", "max_positions", "tied", "embed_scale",
            "positions", "logit_scale", "logit_softcap", "head_bias", "embed_norm",
            "embed_norm_text_only", "layer_inputs", "extra_vocab_rows", "suppressed_tokens",
            "add_media_embeds", "deep_layers", "pool", "names", "head_layer",
            "sinusoidal_positions", "sinusoid_steps", "cycles", "altup",
        )  # fmt: skip
        if decoder.extra_vocab_rows and decoder.tied:
            raise Unsupported("Decoder.extra_vocab_rows of a tied table")
        stage = self.stage
        stream = ProgramStream(program.buffer("residual"))
        if stage.is_first:
            self._emit_embedding(program, stream.residual)
        elif self.handed is not None:
            self.handed.emit_take(program, stream)
        self._emit_blocks(program, stream)
        if self.handed is not None and not stage.is_last:
            if stream.deferred >= 0:
                raise Unsupported("a mixture's outcome that joins in the next stage")
            self.handed.emit_hand_on(program, stream)
            return
        final = stream.residual
        if decoder.norm.kind != "none":
            final = self.norm.emit(program, final, program.buffer("final"), 0, stream.selected)
        program.ops.hidden(x=final, dim=decoder.dim)
        if decoder.head_layer is not None:
            dense, act = program.buffer("head dense"), act_code(decoder.head_layer.act, False)
            rows = stream.selected
            program.linear(self.head_dense.packed, final, dense, selected=rows, act=act)
            final = self.head_norm.emit(program, dense, dense, 0, rows)
        scale, softcap = decoder.logit_scale, decoder.logit_softcap
        program.logits(self.packed_head, final, stream.selected, scale, softcap, self.head_site)

    def _emit_blocks(self, program: ProgramBuilder, stream: ProgramStream) -> None:
        stage, layers = self.stage, self.taps.layers if self.taps else ()
        if self.decoder.cycles is not None:
            self.cycles.emit(program, stream, self.norm)
            return
        if layers and self._reads_mean:
            raise Unsupported("means of residual streams for a drafter")
        if self.banks and stage.is_first:
            embeds = program.buffer("embeddings")
            program.ops.copy(x=stream.residual, y=embeds, dim=self.decoder.dim)
        if self.decoder.altup is not None and stage.is_first:
            self.altup.emit_begin(program, stream)
        program.emit_taps(stream, layers, -1 if stage.is_first else len(self.blocks))
        for index in range(stage.first, stage.end):
            is_last = index == stage.num_layers - 1
            self.blocks[index].emit(program, stream, is_last)
            program.emit_taps(stream, layers, index)
        if self.decoder.altup is not None and stage.is_last:
            self.altup.emit_end(program, stream)

    def _emit_embedding(self, program: ProgramBuilder, target: int) -> None:
        decoder, table = self.decoder, self.embed.plain_table
        args = struct(
            "EmbedArgs", table=program.hold(table), vocab=self.embed.rows, dim=decoder.dim,
            dtype=0 if table is None else dtype_code(table.dtype, "embedding"),
            scale=decoder.embed_scale,
        )  # fmt: skip
        if decoder.positions is not None:
            rows, offset = decoder.positions
            if decoder.sinusoidal_positions:
                program.max_kv_len = rows = program.num_positions
                table_PD = self._positions(torch.arange(rows + offset))
            else:
                table_PD = self.positions.unpack().float()
            args.positions_table, args.position_offset = program.hold(table_PD), offset
        tied = program.packed(self.embed.tied).handle if table is None else None
        program.ops.embed(y=target, tied=tied, args=args, replaced=True)
        if decoder.embed_norm is not None:
            self.embed_norm.emit(program, target, target)
        if decoder.layer_inputs is not None:
            self.inputs.emit(program, target)

    def without_weights(self) -> DecoderModel:
        """The layers of all stages and ranks, empty."""
        context = replace(self.context, ranks=ALONE, attention_groups=None)
        return DecoderModel(self.decoder, context, self.weight_dtype, merge_windows=True)

    def without_program(self, backend: object, ropes: RopeTables) -> DecoderModel:
        """The same layers with other ropes, always run layer by layer over ``backend``."""
        model = copy(self)
        model.use_program, model.program, model._program_backend = False, None, backend
        model.ropes = ropes
        return model

    def adapt(self, layers: Sequence[Adaptable]) -> None:
        """Let adapters change these layers, numbered in this order, then the head and the token
        table; once the weights are loaded. A layer of two matrices comes twice."""
        for site, layer in enumerate(layers):
            if not site or layer is not layers[site - 1]:
                layer.adapt(site, self._step_adapters)
        self.adapted = tuple(dict.fromkeys(layers))
        self.head_site, self.embed_site = len(layers), len(layers) + 1
        self._program_backend = None  # an older program knows nothing of adapters

    def step(self, batch: ForwardBatch, need_hidden: bool) -> tuple[Tensor | None, Tensor | None]:
        """One step: (hidden states of all tokens [T, D], logits of ``logits_rows_R`` [R, V]).

        Hidden states are None unless needed: without them the last block and the head run on
        the wanted rows only. Logits are None when no row is wanted. Of several stages only the last
        has both.
        """
        if self.pipeline is not None:
            return self.pipeline.step(self, batch, need_hidden)
        return self.step_alone(batch, need_hidden)

    def step_alone(
        self, batch: ForwardBatch, need_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """``step`` of the last stage."""
        rows_R, num_tokens = batch.logits_rows_R, batch.num_tokens
        if self.context.ranks.tp.size > 1:
            batch.leaves_taps = True  # the other ranks do not know whether drafts rest
        needs = self.taps if batch.leaves_taps else None
        # the program's last block computes the rows with logits only
        reads_end = needs is not None and (needs.final or len(self.blocks) - 1 in needs.layers)
        program, num_rows = self._program_for(batch), rows_R.shape[0]
        if program is not None and not need_hidden and num_rows and not reads_end:
            return None, program.logits(batch)
        hidden_TD: Tensor | None
        logits_RV = None
        if program is not None and num_rows == num_tokens:
            hidden_TD, logits_RV = program.hidden_and_logits(batch)
        else:
            hidden_TD = self.forward(batch)
            if num_rows:
                lora = None if batch.lora is None else batch.lora.select(rows_R)
                logits_RV = self.stage_logits(hidden_TD[rows_R], lora)
        if needs is not None and needs.final:
            parts = [hidden_TD] if batch.taps_TN is None else [batch.taps_TN, hidden_TD]
            batch.taps_TN = torch.cat(parts, -1)
        return (hidden_TD if need_hidden else None), logits_RV

    def go_on(
        self, batch: ForwardBatch, logits_RV: Tensor, how: Continuation
    ) -> tuple[Tensor, Tensor] | None:
        """Sample from the logits of the step that has just run, and go on with the tokens: see
        ``StepProgram``. None where the step was no program's, or leaves more than logits."""
        if self.pipeline is not None or (self.taps is not None and batch.leaves_taps):
            return None
        program = self._program_for(batch)
        return None if program is None else program.go_on(batch, logits_RV, how)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of the step's tokens after the final norm: [T, D]. A stage that is not the
        last hands the residual stream to the next."""
        if self.pipeline is not None:
            self.pipeline.begin(batch)
        self._step_adapters.rows = batch.lora
        if self.stage.is_first:
            self._adapt_embeds(batch)
        program = self._program_for(batch)
        if program is None:
            return self._run_layers(batch)
        x_TD = program.hidden(batch)
        if self.pipeline is not None and self.handed is not None and not self.stage.is_last:
            x_TD = self.handed.unpack(x_TD, batch.scratch)
            self.pipeline.hand_on(batch, x_TD, {})
        return x_TD

    def _adapt_embeds(self, batch: ForwardBatch) -> None:
        """Embeddings of tokens whose adapters change the token table take the table's place, except
        where others do already."""
        lora, site = batch.lora, self.embed_site
        if lora is None or not lora.has(site):
            return
        embeds = batch.add_embeds(self.decoder.dim)
        if embeds.mask_T is None:
            return
        rows_M = (lora.changed_T(site) & ~embeds.mask_T).nonzero()[:, 0]
        ids_M = batch.token_ids_T[rows_M]
        x_MD = self.embed.run(ids_M)
        lora.select(rows_M).add_embeds_(site, ids_M, x_MD, self.embed.scale)
        embeds.rows_TD[rows_M] = x_MD.to(embeds.rows_TD.dtype)
        embeds.mask_T[rows_M] = True

    def _program_for(self, batch: ForwardBatch) -> StepProgram | None:
        """The program of the batch's backend, made when the backend or its pools are new."""
        program = self.program
        if batch.attn is not self._program_backend or (program and not program.is_current(batch)):
            self._program_backend = batch.attn
            states = None if batch.states is None else batch.states.pool
            self.program = program = None
            if self.use_program:
                self.program = program = make_program(self, batch.attn, states)
        if program is None:
            return None
        accepts, groups = program.accepts(batch), self.context.attention_groups
        if groups is not None:  # layers do not gather what the program gathers
            accepts = groups.agree(accepts)
        return program if accepts else None

    def _run_layers(self, batch: ForwardBatch) -> Tensor:
        """The step layer by layer."""
        stage, media = self.stage, batch.media
        angles = self.ropes.angles(batch)
        x_TD = self._begin(batch) if stage.is_first else batch.carried[RESIDUAL]
        deep_LTD = () if media is None or media.deepstack_LTD is None else media.deepstack_LTD
        deep = dict(zip(self.decoder.deep_layers or range(len(deep_LTD)), deep_LTD, strict=False))
        if self.decoder.cycles is not None:
            return self.cycles.run(x_TD, batch, angles, self.norm.run)
        kept = kept_of(batch.carried)
        pending_TD: Tensor | None = None  # yet to be added to x
        layers = self.taps.layers if self.taps and batch.leaves_taps else ()
        tapped = {-1: x_TD.clone()} if -1 in layers and stage.is_first else {}
        for layer in range(stage.first, stage.end):
            if self.decoder.skips:
                x_TD, pending_TD = self._skipped(layer, added(x_TD, pending_TD), kept), None
            if self.pager is not None:
                self.pager.before(layer)
            x_TD, pending_TD = self.blocks[layer].run_deferred(x_TD, pending_TD, batch, angles)
            if self.pager is not None:
                self.pager.after(layer)
            if layer in deep:
                x_TD, pending_TD = added(x_TD, pending_TD) + deep[layer].to(x_TD.dtype), None
            if layer in layers:  # a sum of its own: the next norm's rounding stays the same
                tapped[layer] = x_TD.clone() if pending_TD is None else x_TD + pending_TD
        if layers:
            parts = [tapped.get(layer) for layer in layers]
            batch.taps_TN = _filled(batch.taps_TN, parts, x_TD, self._reads_mean)
        if self.pipeline is not None and not stage.is_last:
            x_TD = added(x_TD, pending_TD)
            self.pipeline.hand_on(batch, x_TD, kept)
            return x_TD
        return self.norm.add_run(self._end(x_TD, batch), pending_TD)

    def _begin(self, batch: ForwardBatch) -> Tensor:
        """The first block's input, and what all blocks read."""
        x_TD, scratch = self._embed(batch), batch.scratch
        scratch.embeds_TD = x_TD.clone() if self.banks else None  # blocks change x in place
        if self.decoder.layer_inputs is not None:
            scratch.per_layer_TLP = self.inputs.inputs(batch.token_ids_T, x_TD)
        if self.decoder.altup is not None:
            scratch.per_layer_TLP = self.altup.inputs(batch.token_ids_T, x_TD)
            x_TD = self.altup.begin(x_TD)
        has_streams = (self.decoder.streams or self.decoder.gated_streams) is not None
        return self.streams.begin(x_TD) if has_streams else x_TD

    def _end(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """What the last norm reads, of the last block's output."""
        if (self.decoder.streams or self.decoder.gated_streams) is not None:
            x_TD = self.streams.end(x_TD)
        if self.decoder.residual_sums:
            (x_TD,) = self.sums_end.run(batch.scratch.sums_TND, x_TD)
        return x_TD if self.decoder.altup is None else self.altup.end(x_TD)

    def _skipped(self, layer: int, x_TD: Tensor, kept: dict[int, Tensor]) -> Tensor:
        """The input of block ``layer``; what later blocks read of it is added to ``kept``."""
        if any(skip.source == layer for skip in self.decoder.skips):
            kept[layer] = x_TD.clone()  # blocks change x in place
        for skip in self.decoder.skips:
            if skip.at == layer:
                x_TD = kept[skip.source] * skip.share + x_TD * (1.0 - skip.share)
        return x_TD

    def _embed(self, batch: ForwardBatch) -> Tensor:
        x_TD = self.embed.run(batch.token_ids_T)
        if self.decoder.embed_norm_text_only:
            x_TD = self.embed_norm.run(x_TD)
        if self.decoder.embed_dim:
            x_TD = self.embed_in.run(x_TD)
        if batch.embeds is not None:
            x_TD = self._replace_embeds(x_TD, batch.embeds, batch.media)
        if self.decoder.positions is not None:
            x_TD += self._positions(batch.positions_T + self.decoder.positions[1])
        if self.decoder.embed_affine:
            x_TD = self.embed_affine.run(x_TD)
        norm_comes = self.decoder.embed_norm is not None and not self.decoder.embed_norm_text_only
        return self.embed_norm.run(x_TD) if norm_comes else x_TD

    def _replace_embeds(
        self, x_TD: Tensor, embeds: InputEmbeds, media: MediaInputs | None
    ) -> Tensor:
        """The embeddings, replaced by the rows of ``embeds``; a new tensor."""
        rows_TD = embeds.rows_TD.to(x_TD.dtype)
        if self.decoder.add_media_embeds and media is not None and media.mask_T is not None:
            rows_TD = torch.where(media.mask_T[:, None], rows_TD + x_TD, rows_TD)
        if embeds.mask_T is not None:
            return torch.where(embeds.mask_T[:, None], rows_TD, x_TD)
        return rows_TD.clone() if rows_TD is embeds.rows_TD else rows_TD

    def _positions(self, rows_T: Tensor) -> Tensor:
        if self.decoder.sinusoidal_positions:
            return sinusoids(rows_T, self.decoder.dim, self.decoder.sinusoid_steps)
        return self.positions.run(rows_T)

    def whole_logits(self, hidden_RD: Tensor) -> Tensor:
        """``logits`` without adapters, which this rank computes alone."""
        return self.stage_logits(hidden_RD, None, self.whole_head)

    def logits(self, hidden_RD: Tensor, lora: LoraRows | None = None) -> Tensor:
        """float32 [R, V], scaled and capped; a new tensor. ``lora``: the rows' adapters. All ranks
        call it and the first gets the logits; of several stages the last computes them."""
        if self.pipeline is not None and not self.stage.is_last:
            if self.pipeline.place.rank == 0:
                return self.pipeline.take_result(TARGETS)
            return hidden_RD.new_empty((0, self.decoder.vocab))
        logits_RV = self.stage_logits(hidden_RD, lora)
        if self.pipeline is not None:
            self.pipeline.give_result(TARGETS, logits_RV)
        return logits_RV

    def stage_logits(
        self,
        hidden_RD: Tensor,
        lora: LoraRows | None,
        head: PackedLinear | TiedTable | None = None,
    ) -> Tensor:
        """``logits`` of the last stage, which stay there. ``head``: another than the model's."""
        decoder = self.decoder
        if decoder.head_layer is not None:
            dense_RD = self.head_dense.run(hidden_RD)
            act = self.context.kernels.activate
            hidden_RD = self.head_norm.run(act(dense_RD, decoder.head_layer.act))
        if decoder.embed_dim:
            hidden_RD = self.embed_out.run(hidden_RD)
        input_RD = hidden_RD
        if self.context.scheme.head_storage == "float32":
            input_RD = hidden_RD.float()
        if lora is not None and lora.has(self.head_site):
            own = self.packed_head
            cut = own if isinstance(own, CutLinear) else None
            logits_RV = (own if cut is None else cut.inner).run(input_RD).float()
            lora.add_(self.head_site, hidden_RD, logits_RV)
            logits_RV = logits_RV if cut is None else cut.gathered(logits_RV)
        else:
            run = self._run_head if head is None else head.run
            logits_RV = run(input_RD).float()
        if decoder.logit_scale != 1.0:
            logits_RV = logits_RV * decoder.logit_scale
        if decoder.logit_softcap:
            logits_RV = self.context.kernels.softcap(logits_RV, decoder.logit_softcap)
        if decoder.suppressed_tokens:
            logits_RV.index_fill_(1, self._suppressed_tokens, -torch.inf)
        return logits_RV
