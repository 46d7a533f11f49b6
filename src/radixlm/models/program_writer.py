"""Writes a decoder as the list of operations of a C++ program.

Buffers hold a row a token. The last block picks the rows whose logits are wanted as soon as its
mixer is done: what follows runs on those rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from radixlm.arch.spec import Decoder
from radixlm.attention.cpu import CpuPool
from radixlm.kernels.cpu.checks import dtype_code
from radixlm.kernels.cpu.extension import address
from radixlm.kernels.cpu.linear import act_code
from radixlm.kernels.cpu.moe import SCORE_CODE
from radixlm.layers.altup import PerLayerInputsMaker
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer, ParallelHybridLayer, PerLayerInputLayer
from radixlm.layers.embedding import Embedding
from radixlm.layers.extended_attention import ExtendedAttentionLayer
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.moe import MoeLayer
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import RopeTables
from radixlm.models.program_cover import experts_of, is_block_covered
from radixlm.models.program_mixers import attend_heads, attend_latents, attend_variant
from radixlm.models.program_ops import GATES, NOWHERE, Branch, Norming, ProgramOps, packed_of
from radixlm.models.program_states import ProgramState, mix_states
from radixlm.pools.state import StatePool


class ProgramSource(Protocol):
    """The parts of a model that a program is made of."""

    decoder: Decoder
    embed: Embedding
    blocks: list[BlockLayer]
    norm: NormLayer
    ropes: RopeTables

    @property
    def packed_head(self) -> object:
        """The output head that ``logits`` runs."""
        ...

    @property
    def table_norm(self) -> NormLayer | None:
        """The norm of the embeddings."""
        ...

    @property
    def per_layer_inputs(self) -> PerLayerInputsMaker | None:
        """What makes inputs of each layer's own."""
        ...

    def positions_table(self) -> Tensor | None:
        """The learned positions in float32."""
        ...


def is_covered(model: ProgramSource) -> bool:
    """Whether a program can say all that the model does."""
    own = [] if model.per_layer_inputs is None else [model.per_layer_inputs.project.packed]
    ends = all(packed_of(linear) is not None for linear in (model.packed_head, *own))
    return ends and all(is_block_covered(block) for block in model.blocks)


@dataclass(slots=True)
class Rows:
    """Where the residual stream is, and whether it holds the picked rows only. ``late`` waits for
    the end of the next block."""

    residual: int
    is_picked: bool = False
    late: int = NOWHERE


class ProgramWriter:
    """Builds one program. ``keep`` holds what the program knows by address only."""

    def __init__(
        self, model: ProgramSource, pools: list[CpuPool], states: StatePool | None = None
    ) -> None:
        decoder = model.decoder
        self.ops = ProgramOps(decoder.dim, pools, states, decoder.max_positions)
        self.program: Any = self.ops.program
        self.keep = self.ops.keep
        self.keep.append(model)
        self._model, self._dim = model, decoder.dim

    def write(self) -> None:
        """Embedding, blocks, final norm, head."""
        model, decoder, ops = self._model, self._model.decoder, self.ops
        rows = Rows(ops.buffer("residual"))
        self._embed(rows.residual)
        for block in model.blocks:
            self._block(block, rows, is_last=block is model.blocks[-1])
        final = ops.norm(model.norm, rows.residual, "final", rows.is_picked)
        self.program.hidden(final, self._dim)
        head = packed_of(model.packed_head)
        assert head is not None
        final = ops.in_order(model.packed_head, final, rows.is_picked)
        self.program.logits(final, head.handle, decoder.logit_scale, decoder.logit_softcap)

    def _embed(self, target: int) -> None:
        model, decoder = self._model, self._model.decoder
        positions, table = model.positions_table(), model.embed.plain_table
        tied = packed_of(model.packed_head) if table is None else None
        self.keep += [positions, table]
        self.program.embed(
            target,
            None if tied is None else tied.handle,
            address(table),
            0 if table is None else dtype_code(table.dtype, "embedding"),
            decoder.vocab + decoder.extra_vocab_rows,
            self._dim,
            decoder.embed_scale,
            address(positions),
            0 if decoder.positions is None else decoder.positions[1],
        )
        if model.table_norm is not None:
            self.ops.norm_in_place(model.table_norm, target, self._dim)
        if model.per_layer_inputs is not None:
            self._make_inputs(model.per_layer_inputs, target)

    def _make_inputs(self, maker: PerLayerInputsMaker, source: int) -> None:
        """Each layer's own input, one behind another in a row; see layers/altup.py."""
        spec, width = maker._inputs, maker.project.out_features
        count = width // spec.dim
        made = self.ops.buffer("inputs", width)
        self.ops.linear(maker.project.packed, source, made, scale=self._dim**-0.5)
        norm = maker.project_norm
        places = (made, 0), (made, 0)
        self.ops.norm_heads(*places, (count, spec.dim), norm.weight_D, Norming(norm.spec.eps))
        if spec.vocab:
            table, read = maker.per_layer.plain_table, self.ops.buffer("read inputs", width)
            assert table is not None
            code = dtype_code(table.dtype, "embedding")
            self.program.embed(
                read, None, self.ops.held(table), code, spec.vocab, width,
                maker.per_layer.scale, 0, 0, is_second=True,
            )  # fmt: skip
            self.program.add(read, made, width, 1.0, False)
            self.program.scale(made, 0, width, 2**-0.5, 0.0, False, False)

    def _join_input(self, layer: PerLayerInputLayer, rows: Rows) -> None:
        """``x += norm(out(act(gate(x)) * input))``."""
        ops, spec, picked = self.ops, layer._spec, rows.is_picked
        own, offset = ops.buffer("own input", spec.dim), layer._index * spec.dim
        act = act_code(spec.act, False)
        ops.linear(layer.gate.packed, rows.residual, own, is_picked=picked, act=act)
        given = ops.buffer("inputs", len(self._model.blocks) * spec.dim)
        if picked:
            few = ops.buffer("picked input", spec.dim)
            self.program.gather(given, few, spec.dim, offset)
            given, offset = few, 0
        plain = GATES["plain"]
        self.program.gate(given, own, 1, spec.dim, offset, spec.dim, picked, plain, False)
        branch = ops.linear(layer.out.packed, own, ops.buffer("branch"), is_picked=picked)
        ops.add(ops.norm(layer.norm, branch, "h", picked), rows.residual, 1.0, picked)

    def _block(self, block: BlockLayer, rows: Rows, is_last: bool) -> None:
        layout = block.spec.layout
        if block.mixer is None or block.spec.ffn is None:
            self._single(block, rows, is_last)
        elif layout in ("post", "sandwich"):
            self._normed_branches(block, rows, is_last)
        else:
            self._joined_branches(block, rows, is_last)
        if (own := getattr(block, "layer_input", None)) is not None:
            self._join_input(own, rows)
        if block.spec.out_scale:
            assert block._scale is not None
            self.ops.scale(rows.residual, float(block._scale), rows.is_picked)

    def _single(self, block: BlockLayer, rows: Rows, is_last: bool) -> None:
        """A mixer or a feed-forward alone."""
        if block.mixer is None:
            if is_last:
                self._pick([], rows, NOWHERE)
            if block.spec.ffn is not None:
                assert isinstance(block.ffn, MlpLayer | MoeLayer)
                normed = self.ops.norm(block.norm1, rows.residual, "h", rows.is_picked)
                self._feed_into(block.ffn, normed, rows, block.spec.residual)
            return
        normed = self.ops.norm(block.norm1, rows.residual, "h")
        branches = self._mix(block.mixer, normed)
        if is_last:
            branches, _ = self._pick(branches, rows, NOWHERE)
        self._project_into(branches, rows, block.spec.residual)

    def _joined_branches(self, block: BlockLayer, rows: Rows, is_last: bool) -> None:
        """Layouts whose branches go straight into the residual stream."""
        layout, scale, ops = block.spec.layout, block.spec.residual, self.ops
        assert block.mixer is not None and isinstance(block.ffn, MlpLayer | MoeLayer)
        normed = (
            rows.residual
            if layout == "prenorm_ffn_only"
            else ops.norm(block.norm1, rows.residual, "h")
        )
        branches = self._mix(block.mixer, normed)
        if is_last:
            branches, normed = self._pick(branches, rows, normed)
        if layout == "parallel":
            self._feed_into(block.ffn, normed, rows, scale)
            self._project_into(branches, rows, scale)
        elif layout == "parallel2":
            second = ops.norm(block.norm2, rows.residual, "g", rows.is_picked)
            self._project_into(branches, rows, scale)
            self._feed_into(block.ffn, second, rows, scale)
        else:
            self._project_into(branches, rows, scale)
            before = block.norm1 if layout == "prenorm_ffn_only" else block.norm2
            second = ops.norm(before, rows.residual, "h", rows.is_picked)
            late, rows.late = rows.late, self._side(block, second, rows)
            self._feed_into(block.ffn, second, rows, scale)
            if late != NOWHERE:
                ops.add(late, rows.residual, 1.0, rows.is_picked)

    def _side(self, block: BlockLayer, source: int, rows: Rows) -> int:
        """What joins the residual stream one block later."""
        if block.spec.deferred_moe is None:
            return NOWHERE
        names = ("side", "other side")
        target = self.ops.buffer(names[rows.late == self.ops.buffer(names[0])])
        self._feed_to(block.deferred_moe, source, target, 1.0, rows.is_picked)
        return target

    def _normed_branches(self, block: BlockLayer, rows: Rows, is_last: bool) -> None:
        """Layouts whose branches pass a norm before they join: post and sandwich."""
        assert block.mixer is not None and isinstance(block.ffn, MlpLayer | MoeLayer)
        ops, is_sandwich, scale = self.ops, block.spec.layout == "sandwich", block.spec.residual
        kept, mixed, kept2, fed = block.spec.weights or (1.0, 1.0, 1.0, 1.0)
        normed = ops.norm(block.norm1, rows.residual, "h") if is_sandwich else rows.residual
        branches = self._mix(block.mixer, normed)
        if is_last:
            branches, _ = self._pick(branches, rows, normed)
        branch, picked = ops.buffer("branch"), rows.is_picked
        self._project_to(branches, branch, scale, picked)
        self._join(block.norm2 if is_sandwich else block.norm1, branch, rows, (kept, mixed))
        source = rows.residual
        if is_sandwich:
            source = ops.norm(block.norm3, rows.residual, "h", picked)
        self._feed_to(block.ffn, source, branch, scale, picked)
        if block.spec.parallel_moe is not None:
            self._feed_beside(block, branch, rows)
        self._join(block.norm4 if is_sandwich else block.norm2, branch, rows, (kept2, fed))

    def _feed_beside(self, block: BlockLayer, branch: int, rows: Rows) -> None:
        """``branch = norm(branch) + norm(experts of the residual)``."""
        ops, picked = self.ops, rows.is_picked
        ops.norm_in_place(block.norm5, branch, self._dim, 0, picked)
        source, target = ops.norm(block.norm6, rows.residual, "g", picked), ops.buffer("beside")
        self._mixture(block.parallel_moe, source, target, 1.0, picked, False, rows.residual)
        ops.norm_in_place(block.norm7, target, self._dim, 0, picked)
        ops.add(target, branch, 1.0, picked)

    def _join(self, norm: NormLayer, branch: int, rows: Rows, factors: tuple[float, float]) -> None:
        """``residual = residual * factor + norm(branch) * factor``."""
        normed = self.ops.norm(norm, branch, "h", rows.is_picked)
        self.ops.scale(rows.residual, factors[0], rows.is_picked)
        self.ops.add(normed, rows.residual, factors[1], rows.is_picked)

    def _mix(self, layer: object, source: int) -> list[Branch]:
        """What the mixer gives before its output projections."""
        if isinstance(layer, ParallelHybridLayer):
            return self._mix(layer.attention, source) + self._mix(layer.state, source)
        if isinstance(layer, LatentAttentionLayer):
            return [attend_latents(self.ops, layer, source)]
        if isinstance(layer, ExtendedAttentionLayer):
            return [attend_variant(self.ops, layer, source)]
        if isinstance(layer, AttentionLayer):
            return [attend_heads(self.ops, layer, source)]
        assert isinstance(layer, ProgramState)
        return [mix_states(self.ops, layer, source)]

    def _pick(self, branches: list[Branch], rows: Rows, normed: int) -> tuple[list[Branch], int]:
        """Gather the wanted rows of the mixer's outcome and of the streams."""
        gathered = []
        for number, branch in enumerate(branches):
            few = self.ops.buffer(f"picked branch {number}", branch.width)
            self.program.gather(branch.buffer, few, branch.width)
            gathered.append(Branch(few, branch.width, branch.out))
        residual = self._gathered(rows.residual, "picked residual")
        if normed not in (rows.residual, NOWHERE):
            few_normed = self._gathered(normed, "picked normed")
        else:
            few_normed = residual
        if rows.late != NOWHERE:
            rows.late = self._gathered(rows.late, "picked late")
        rows.residual, rows.is_picked = residual, True
        return gathered, few_normed

    def _gathered(self, source: int, name: str) -> int:
        target = self.ops.buffer(name)
        self.program.gather(source, target, self._dim)
        return target

    def _project_into(self, branches: list[Branch], rows: Rows, scale: float) -> None:
        for branch in branches:
            self.ops.linear(
                branch.out.packed, branch.buffer, rows.residual, rows.residual, scale,
                rows.is_picked,
            )  # fmt: skip

    def _project_to(
        self, branches: list[Branch], target: int, scale: float, is_picked: bool
    ) -> None:
        residual = NOWHERE
        for branch in branches:
            self.ops.linear(branch.out.packed, branch.buffer, target, residual, scale, is_picked)
            residual = target

    def _feed_into(self, layer: MlpLayer | MoeLayer, source: int, rows: Rows, scale: float) -> None:
        """The feed-forward's outcome joins the residual stream."""
        target, picked = rows.residual, rows.is_picked
        if isinstance(layer, MlpLayer):
            self._dense(layer, source, target, target, scale, picked)
        elif layer.spec.out_norm is not None:
            branch = self.ops.buffer("branch")
            self._feed_to(layer, source, branch, 1.0, picked)
            self.ops.add(branch, target, scale, picked)
        else:
            self._mixture(layer, source, target, scale, picked, adds=True)

    def _feed_to(
        self, layer: MlpLayer | MoeLayer, source: int, target: int, scale: float, is_picked: bool
    ) -> None:
        """The feed-forward's outcome times ``scale``, in a buffer."""
        if isinstance(layer, MlpLayer):
            self._dense(layer, source, target, NOWHERE, scale, is_picked)
            return
        has_norm = layer.spec.out_norm is not None
        self._mixture(layer, source, target, 1.0 if has_norm else scale, is_picked, adds=False)
        if has_norm:
            self.ops.norm_in_place(layer.out_norm, target, self._dim, 0, is_picked)
            self.ops.scale(target, scale, is_picked)

    def _dense(
        self, layer: MlpLayer, source: int, target: int, residual: int, scale: float,
        is_picked: bool,
    ) -> None:  # fmt: skip
        spec = layer.spec
        up = self.ops.buffer("up", spec.inner)
        is_xielu = spec.act == "xielu"
        name = f"{spec.act}_mul" if spec.gated else None if is_xielu else spec.act
        act = act_code(name, spec.gated)
        self.ops.linear(layer.up.packed, source, up, is_picked=is_picked, act=act)
        if is_xielu:
            own = layer.act
            rising = (own._above, own._below, own._eps, own._beta)
            self.program.xielu(up, spec.inner, [float(t) for t in rising], is_picked)
        if spec.sub_norm is not None:
            self.ops.norm_in_place(layer.sub_norm, up, spec.inner, 0, is_picked)
        self.ops.linear(layer.down.packed, up, target, residual, scale, is_picked)

    def _mixture(
        self, layer: MoeLayer, source: int, target: int, scale: float, is_picked: bool,
        adds: bool, routed_by: int = NOWHERE,
    ) -> None:  # fmt: skip
        """``target (+)= scale * (experts + shared expert)``. The router reads the source unless it
        reads another buffer."""
        spec, experts, ops = layer.spec, experts_of(layer), self.ops
        assert experts is not None
        seen = source if routed_by == NOWHERE else routed_by
        if spec.router_norm is not None:
            seen = ops.norm(layer.router_norm, seen, "routed by", is_picked)
        logits = ops.project(layer.router, seen, "router", is_picked)
        route = (
            *(spec.experts + spec.zero_experts, spec.top_k, SCORE_CODE[spec.score]),
            *(spec.renorm, spec.scale, ops.held(layer.correction_E)),
            *(*spec.groups, spec.group_score == "top2"),
        )
        self.keep.append(experts)
        more = (
            *(adds, spec.zero_experts, spec.zero_experts_are_identity, spec.scale_input),
            *(ops.held(layer._scale_E), spec.jitter),
        )
        self.program.moe(source, logits, target, experts.handle, route, scale, is_picked, more)
        if spec.shared is None:
            return
        if not spec.shared_gate:
            self._dense(layer.shared, source, target, target, scale, is_picked)
            return
        shared = ops.buffer("shared")
        self._dense(layer.shared, source, shared, NOWHERE, scale, is_picked)
        gates = ops.project(layer.shared_gate, source, "shared gate", is_picked)
        self.program.gate(gates, shared, 1, self._dim, 0, self._dim, is_picked, 0, True)
        ops.add(shared, target, 1.0, is_picked)
