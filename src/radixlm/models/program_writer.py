"""Writes a decoder as the list of operations of a C++ program.

Buffers hold a row a token. The last block picks the rows whose logits are wanted as soon as its
attention is done: what follows runs on those rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from radixlm.arch.spec import Attention, Decoder
from radixlm.attention.cpu import CpuPool
from radixlm.kernels.cpu.checks import dtype_code
from radixlm.kernels.cpu.extension import address, native
from radixlm.kernels.cpu.heads import HeadLinear
from radixlm.kernels.cpu.linear import PackedLinear, act_code
from radixlm.kernels.cpu.moe import SCORE_CODE, Experts
from radixlm.kernels.cpu.rope import NORM_CODE
from radixlm.layers.attention import AttentionLayer
from radixlm.layers.block import BlockLayer
from radixlm.layers.embedding import Embedding
from radixlm.layers.latent import LatentAttentionLayer
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.moe import MoeLayer
from radixlm.layers.norm import NormLayer
from radixlm.layers.rope import RopeTables

NOWHERE = -1  # no buffer

Mixer = AttentionLayer | LatentAttentionLayer


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

    def positions_table(self) -> Tensor | None:
        """The learned positions in float32."""
        ...


def packed_of(linear: object) -> PackedLinear | None:
    """The C++ weight behind a packed linear; None if something else runs it."""
    packed = getattr(linear, "packed", None)
    return packed if isinstance(packed, PackedLinear) else None


def experts_of(layer: MoeLayer) -> Experts | None:
    """The C++ experts of a layer; None if something else runs them."""
    return layer.experts if isinstance(layer.experts, Experts) else None


def is_covered(model: ProgramSource) -> bool:
    """Whether a program can say all that the model does."""
    blocks = all(_is_block_covered(block) for block in model.blocks)
    return blocks and packed_of(model.packed_head) is not None


def _is_block_covered(block: BlockLayer) -> bool:
    mixer, ffn = block.mixer, block.ffn
    if not isinstance(mixer, Mixer) or not _is_mixer_covered(mixer):
        return False
    weights: list[object] = []
    dense: object = ffn
    if isinstance(ffn, MoeLayer):
        is_plain = block.spec.layout in ("pre", "parallel", "parallel2")
        if not is_plain or ffn.spec.shared_gate or experts_of(ffn) is None:
            return False
        weights.append(ffn.router.packed)
        dense = ffn.shared if ffn.spec.shared is not None else None
    if isinstance(dense, MlpLayer):
        weights += [dense.up.packed, dense.down.packed]
    return all(packed_of(weight) is not None for weight in weights)


def _is_mixer_covered(mixer: Mixer) -> bool:
    if isinstance(mixer, AttentionLayer):
        weights = [mixer.qkv, mixer.o]
        is_known = not (mixer.spec.gate and mixer.spec.qk_norm == "row")
    else:
        queries = [mixer.q_a, mixer.q_b] if mixer.spec.q_rank else [mixer.q]
        weights = [*queries, mixer.kv_a, mixer.o]
        is_known = all(isinstance(w, HeadLinear) for w in (mixer.kv_b.key, mixer.kv_b.value))
    return is_known and all(packed_of(weight.packed) is not None for weight in weights)


def heads_width(mixer: Mixer) -> int:
    """Numbers a token that the output projection reads."""
    spec = mixer.spec
    return spec.heads * (spec.head_dim if isinstance(spec, Attention) else spec.v_dim)


@dataclass(slots=True)
class Rows:
    """Where a block's streams are, and whether they hold the picked rows only."""

    residual: int
    is_picked: bool = False


class ProgramWriter:
    """Builds one program. ``keep`` holds what the program knows by address only."""

    def __init__(self, model: ProgramSource, pools: list[CpuPool]) -> None:
        self.program: Any = native().Program()
        self.keep: list[object] = [model, pools]
        self._model, self._pools, self._dim = model, pools, model.decoder.dim
        self._scratch: dict[tuple[str, int], int] = {}

    def write(self) -> None:
        """Embedding, blocks, final norm, head."""
        model, decoder = self._model, self._model.decoder
        rows = Rows(self._buffer("residual"))
        self._embed(rows.residual)
        for block in model.blocks:
            self._block(block, rows, is_last=block is model.blocks[-1])
        final = self._norm(model.norm, rows.residual, "final", rows.is_picked)
        self.program.hidden(final, self._dim)
        head = packed_of(model.packed_head)
        assert head is not None
        self.program.logits(final, head.handle, decoder.logit_scale, decoder.logit_softcap)

    def _buffer(self, name: str, width: int = 0) -> int:
        key = (name, width or self._dim)
        if key not in self._scratch:
            self._scratch[key] = self.program.buffer(key[1])
        return self._scratch[key]

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
            decoder.vocab,
            self._dim,
            decoder.embed_scale,
            address(positions),
            0 if decoder.positions is None else decoder.positions[1],
        )

    def _block(self, block: BlockLayer, rows: Rows, is_last: bool) -> None:
        assert isinstance(block.mixer, Mixer) and isinstance(block.ffn, MlpLayer | MoeLayer)
        layout = block.spec.layout
        normed = rows.residual if layout == "post" else self._norm(block.norm1, rows.residual, "h")
        attended = self._attend(block.mixer, normed)
        if is_last:
            attended, normed = self._pick(attended, block.mixer, rows, normed)
        if layout == "parallel":
            self._feed_into(block.ffn, normed, rows, block)
            self._project_into(block.mixer, attended, rows, block)
        elif layout == "parallel2":
            second = self._norm(block.norm2, rows.residual, "g", rows.is_picked)
            self._project_into(block.mixer, attended, rows, block)
            self._feed_into(block.ffn, second, rows, block)
        elif layout == "pre":
            self._project_into(block.mixer, attended, rows, block)
            second = self._norm(block.norm2, rows.residual, "h", rows.is_picked)
            self._feed_into(block.ffn, second, rows, block)
        else:
            self._normed_branches(block, attended, rows)

    def _normed_branches(self, block: BlockLayer, attended: int, rows: Rows) -> None:
        """Layouts whose branches pass a norm before they join: post and sandwich."""
        assert isinstance(block.mixer, Mixer) and isinstance(block.ffn, MlpLayer)
        is_sandwich = block.spec.layout == "sandwich"
        branch, scale = self._buffer("branch"), block.spec.residual
        self._linear(block.mixer.o.packed, attended, branch, NOWHERE, scale, rows.is_picked)
        first = block.norm2 if is_sandwich else block.norm1
        self._add(self._norm(first, branch, "h", rows.is_picked), rows)
        source = rows.residual
        if is_sandwich:
            source = self._norm(block.norm3, rows.residual, "h", rows.is_picked)
        up = self._feed_up(block.ffn, source, rows.is_picked)
        self._linear(block.ffn.down.packed, up, branch, NOWHERE, scale, rows.is_picked)
        second = block.norm4 if is_sandwich else block.norm2
        self._add(self._norm(second, branch, "h", rows.is_picked), rows)

    def _attend(self, layer: Mixer, source: int) -> int:
        """The heads' values, a buffer of ``heads_width`` numbers a token."""
        if isinstance(layer, LatentAttentionLayer):
            return self._attend_latents(layer, source)
        return self._attend_heads(layer, source)

    def _attend_latents(self, layer: LatentAttentionLayer, source: int) -> int:
        """Projections, norms, absorbed queries, rope and store, attention to the latents, values
        of what it gives."""
        spec, site, rope = layer.spec, layer.site, layer.spec.rope
        absorb, expand = layer.kv_b.key, layer.kv_b.value
        assert isinstance(absorb, HeadLinear) and isinstance(expand, HeadLinear)
        q_head, row = spec.nope_dim + spec.rope_dim, spec.kv_rank + spec.rope_dim
        queries = self._latent_queries(layer, source)
        latents = self._buffer("latents", row)
        self._linear(layer.kv_a.packed, source, latents, NOWHERE, 1.0, False)
        self._norm_in_place(layer.kv_a_norm, latents, spec.kv_rank, 0)
        if spec.rope_norm is not None:
            self._norm_in_place(layer.k_rope_norm, latents, spec.rope_dim, spec.kv_rank)
        absorbed = self._buffer("absorbed", spec.heads * row)
        self.program.heads(queries, absorbed, absorb.handle, q_head, row, False)
        pool = self._pools[site.group]
        k, v = pool.k[site.layer], pool.v[site.layer]
        self.program.latent_store(
            queries,
            latents,
            absorbed,
            [spec.heads, q_head, spec.rope_dim, spec.kv_rank],
            layer.rope_index,
            rope is not None and rope.interleaved,
            0 if rope is None else rope.dim,
            site.group,
            (k.data_ptr(), v.data_ptr(), dtype_code(pool.dtype, "cache"), pool.page_size),
        )
        averaged = self._buffer("averaged", spec.heads * spec.kv_rank)
        self.keep += [site, absorb, expand]
        self.program.attention(
            absorbed,
            averaged,
            spec.heads,
            row,
            site.scale,
            site.window,
            site.softcap,
            address(site.sinks),
        )
        values = self._buffer("values", spec.heads * spec.v_dim)
        self.program.heads(averaged, values, expand.handle, spec.kv_rank, spec.v_dim, False)
        return values

    def _latent_queries(self, layer: LatentAttentionLayer, source: int) -> int:
        spec = layer.spec
        queries = self._buffer("queries", spec.heads * (spec.nope_dim + spec.rope_dim))
        last = layer.q_b if spec.q_rank else layer.q
        if spec.q_rank:
            low = self._buffer("low queries", spec.q_rank)
            self._linear(layer.q_a.packed, source, low, NOWHERE, 1.0, False)
            self._norm_in_place(layer.q_a_norm, low, spec.q_rank, 0)
            source = low
        self._linear(last.packed, source, queries, NOWHERE, 1.0, False)
        return queries

    def _attend_heads(self, layer: AttentionLayer, source: int) -> int:
        """qkv, norms and rope, store, attention, gate; the buffer of heads * head_dim."""
        spec, site = layer.spec, layer.site
        step = spec.head_dim * (2 if spec.gate else 1)
        qkv = self._buffer("qkv", sum(layer.rows))
        self._linear(layer.qkv.packed, source, qkv, NOWHERE, 1.0, False)
        pool, norm = self._pools[site.group], layer.qk_norm
        norm_fields: tuple[object, ...] = (0, False, 0, 0, 0, 0, 0.0)
        if norm is not None:
            weights = (norm.q_weight, norm.k_weight, norm.q_bias, norm.k_bias)
            self.keep.append(norm)
            addresses = (address(w) for w in weights)
            norm_fields = (NORM_CODE[norm.kind], norm.is_layer_norm, *addresses, norm.eps)
        k, v = pool.k[site.layer], pool.v[site.layer]
        self.program.store(
            qkv,
            [0, layer.rows[0], layer.rows[0] + layer.rows[1]],
            [spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim, step],
            norm_fields,
            layer.rope_index,
            spec.rope is not None and spec.rope.interleaved,
            0 if spec.rope is None else spec.rope.dim,
            site.group,
            (k.data_ptr(), v.data_ptr(), dtype_code(pool.dtype, "cache"), pool.page_size),
        )
        out = self._buffer("attended", spec.heads * spec.head_dim)
        self.keep.append(site)
        self.program.attention(
            qkv, out, spec.heads, step, site.scale, site.window, site.softcap, address(site.sinks)
        )
        if spec.gate:
            self.program.gate(qkv, out, spec.heads, spec.head_dim, spec.head_dim, step, False)
        return out

    def _pick(self, attended: int, layer: Mixer, rows: Rows, normed: int) -> tuple[int, int]:
        """Gather the wanted rows of the attention's output and of the streams."""
        width = heads_width(layer)
        few_attended = self._buffer("picked attended", width)
        self.program.gather(attended, few_attended, width)
        residual, few_normed = self._buffer("picked residual"), self._buffer("picked normed")
        self.program.gather(rows.residual, residual, self._dim)
        if normed == rows.residual:
            few_normed = residual
        else:
            self.program.gather(normed, few_normed, self._dim)
        rows.residual, rows.is_picked = residual, True
        return few_attended, few_normed

    def _project_into(self, layer: Mixer, attended: int, rows: Rows, block: BlockLayer) -> None:
        target = rows.residual
        scale = block.spec.residual
        self._linear(layer.o.packed, attended, target, target, scale, rows.is_picked)

    def _feed_into(
        self, layer: MlpLayer | MoeLayer, source: int, rows: Rows, block: BlockLayer
    ) -> None:
        if isinstance(layer, MoeLayer):
            self._experts_into(layer, source, rows, block)
            if layer.spec.shared is None:
                return
            layer = layer.shared
        up = self._feed_up(layer, source, rows.is_picked)
        target, scale = rows.residual, block.spec.residual
        self._linear(layer.down.packed, up, target, target, scale, rows.is_picked)

    def _experts_into(self, layer: MoeLayer, source: int, rows: Rows, block: BlockLayer) -> None:
        spec, experts = layer.spec, experts_of(layer)
        assert experts is not None
        logits = self._buffer("router", spec.experts)
        self._linear(layer.router.packed, source, logits, NOWHERE, 1.0, rows.is_picked)
        route = (
            *(spec.experts, spec.top_k, SCORE_CODE[spec.score], spec.renorm, spec.scale),
            *(address(layer.correction_E), *spec.groups, spec.group_score == "top2"),
        )
        self.keep += [experts, layer.correction_E]
        target, scale = rows.residual, block.spec.residual
        self.program.moe(source, logits, target, experts.handle, route, scale, rows.is_picked)

    def _feed_up(self, layer: MlpLayer, source: int, is_picked: bool) -> int:
        """The activated inner channels."""
        spec = layer.spec
        up = self._buffer("up", spec.inner)
        act = act_code(f"{spec.act}_mul" if spec.gated else spec.act, spec.gated)
        self._linear(layer.up.packed, source, up, NOWHERE, 1.0, is_picked, act)
        return up

    def _linear(
        self,
        linear: object,
        source: int,
        target: int,
        residual: int,
        scale: float,
        is_picked: bool,
        act: int = 0,
    ) -> None:
        packed = packed_of(linear)
        assert packed is not None
        self.program.linear(source, target, packed.handle, residual, scale, act, is_picked)

    def _norm(self, layer: NormLayer, source: int, name: str, is_picked: bool = False) -> int:
        target = self._buffer(name)
        is_layer_norm = layer.spec.kind == "layer"
        weight, bias, eps = address(layer.weight_D), address(layer.bias_D), layer.spec.eps
        self.program.norm(
            source, NOWHERE, target, weight, bias, self._dim, eps, is_layer_norm, is_picked
        )
        return target

    def _norm_in_place(self, layer: NormLayer, buffer: int, dim: int, offset: int) -> None:
        """Of ``dim`` numbers from ``offset`` of each row."""
        is_layer_norm = layer.spec.kind == "layer"
        weight, bias, eps = address(layer.weight_D), address(layer.bias_D), layer.spec.eps
        self.program.norm(
            buffer, NOWHERE, buffer, weight, bias, dim, eps, is_layer_norm, False, offset
        )

    def _add(self, source: int, rows: Rows) -> None:
        self.program.add(source, rows.residual, self._dim, 1.0, rows.is_picked)
