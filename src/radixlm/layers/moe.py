"""Mixture-of-experts layer. Legend: T tokens, D model channels, E experts, I inner channels."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixlm.arch.spec import DeepRouter, Moe
from radixlm.base.errors import CheckpointError
from radixlm.base.record import replace
from radixlm.distributed.groups import Ranks
from radixlm.kernels.cpu.extension import native
from radixlm.kernels.cpu.linear import ACT_CODE, GATED_CODE
from radixlm.kernels.cpu.moe import Experts
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.generator import seeded
from radixlm.kernels.ops.activation import activate_gated, sigmoid, softcap
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.kernels.ops.moe import (
    ExpertAdapters,
    PackedExperts,
    UngatedExperts,
    pack_experts,
    route,
)
from radixlm.kernels.ops.quantized import QuantScales
from radixlm.layers.context import LayerContext
from radixlm.layers.experts import ExpertSplit, InsideCut, SplitExperts, even_split, native_of
from radixlm.layers.linear import StepAdapters
from radixlm.layers.mlp import MlpLayer
from radixlm.layers.module import Module
from radixlm.layers.norm import NormLayer
from radixlm.layers.placement import Ranges, even_bounds
from radixlm.layers.program import (
    NOWHERE,
    ProgramBuilder,
    Target,
    Unsupported,
    handles,
    struct,
)
from radixlm.quant.param import Cut, Param, Shard
from radixlm.quant.prequantized import to_kernel_weight
from radixlm.step.batch import ForwardBatch

REFERENCE_SCORES = (
    "sparsemixer",
    "sigmoid_topk",
    "sqrtsoftplus",
)  # only the reference kernel has them


class MoeLayer(Module):
    """Router, experts, and the shared expert with its gate."""

    experts: PackedExperts
    router_norm: NormLayer
    out_norm: NormLayer
    width_norm: NormLayer
    expert_norm: NormLayer
    is_recorded = False  # whether ``chosen_TK`` keeps what the tokens of a step chose
    chosen_TK: Tensor | None = None
    share: ExpertSplit | None = None  # with the ranks that hold the other experts
    _noise: torch.Generator | None = None
    on_chosen: Callable[[Tensor], None] | None = None  # told which experts are about to compute
    site = -1  # of up among the layers that adapters may change; down's is the next; -1: none

    def __init__(self, spec: Moe, dim: int, context: LayerContext) -> None:
        self.spec = spec
        self._kernels: Kernels = context.kernels
        self._device = context.device
        self._groups = context.attention_groups
        wide, dim = dim, spec.width or dim  # what the router reads, what the experts read
        self._together = context.scheme.rows_together(dim), context.scheme.rows_together(spec.inner)
        self._fmt_of = context.scheme.expert_fmt
        if spec.deep_router is not None:
            self.deep_router = DeepRouterLayer(spec, spec.deep_router, wide, context)
        else:
            choices = spec.experts + spec.zero_experts + spec.sinks
            self.router = context.plain_linear(wide, choices, spec.bias)
        parts = parts_of(spec)
        self.up = Param((spec.experts, sum(parts), dim), shard=Shard(1, parts))
        self.down = Param((spec.experts, dim, spec.inner), shard=Shard(2))
        if self._has_kernel:
            self.up.accepts_quantized = context.scheme.accepts_quantized(dim)
            self.down.accepts_quantized = context.scheme.accepts_quantized(spec.inner)
        if spec.bias:
            self.up_bias = Param((spec.experts, sum(parts)), "float32", Shard(1))
            self.down_bias = Param((spec.experts, dim), "float32")
        if spec.correction:
            self.correction = Param((spec.experts + spec.zero_experts,), "float32")
        if spec.shared is not None:
            self.shared = MlpLayer(spec.shared, wide, context)
        if spec.shared_gate:
            self.shared_gate = context.plain_linear(wide, 1)
        self._make_optional(spec, wide, dim, context)
        has_kernel = spec.score not in REFERENCE_SCORES and not spec.zero_experts
        self._route = context.kernels.route if has_kernel else route

    def _make_optional(self, spec: Moe, wide: int, dim: int, context: LayerContext) -> None:
        """Optional parts; ``wide`` is the model's channels, ``dim`` the experts'."""
        if spec.sinks:
            self.sink_up = Param((spec.sinks, 2 * spec.inner, dim), shard=Shard(1, parts_of(spec)))
            self.sink_down = Param((spec.sinks, dim, spec.inner), shard=Shard(2))
            self.weight_scale = Param((1,), "float32")
        norms = {"router_norm": wide, "out_norm": wide, "width_norm": dim, "expert_norm": dim}
        for name, channels in norms.items():
            norm = getattr(spec, name)
            if norm is not None:
                layer = NormLayer(norm, (channels,), context.kernels, context.device)
                setattr(self, name, layer)
        if spec.hash_vocab:
            self.experts_of_token = Param((spec.hash_vocab, spec.top_k), "int64")
        if spec.out_bias:
            self.out_bias = Param((wide,), "float32")
        if spec.expert_scale:
            self.expert_scale = Param((spec.experts,), "float32")
        if spec.width:
            self.narrow, self.widen = context.linear(wide, dim), context.linear(dim, wide)

    def split(self, share: ExpertSplit) -> None:
        """Hold this rank's experts only; before the weights are loaded."""
        self.share = share
        self._noise = seeded(0) if share.is_fake else None
        held, inside = (
            Cut(0, self.spec.experts, tuple((e, e + 1) for e in share.held)),
            share.inside,
        )
        cuts = ((), ()) if inside is None else inside.cuts(len(parts_of(self.spec)))
        up, down = ((held, *cut) for cut in cuts)
        self.up.cut(*up)
        self.down.cut(*down)
        if self.spec.bias:
            self.up_bias.cut(*up)
            self.down_bias.cut(*down)

    def own_rows(self, is_up: bool) -> Ranges:
        """The outputs of each expert's up or down that this rank has; () for all."""
        if self.share is None or self.share.inside is None:
            return ()
        return self.share.inside.cuts(len(parts_of(self.spec)))[not is_up][0].ranges

    def even_split(self, ranks: Ranks) -> ExpertSplit:
        """Whole experts on the ranks that --ep-size divides them among, cut inside by the others;
        whole ones on all where no kernel computes a part."""
        spec, group = self.spec, ranks.expert_tp
        if native_of(group) is not None and self._takes_parts:
            inner = even_bounds(spec.inner, group, self._together[0])
            dim = even_bounds(self.down.shape[1], group, self._together[1])
            if inner and dim and not spec.inner % self._together[0]:
                whole = even_split(spec.experts, ranks.experts, spec.zero_experts)
                return replace(whole, inside=InsideCut(group, inner, dim))
        return even_split(spec.experts, ranks.tp, spec.zero_experts)

    @property
    def _takes_parts(self) -> bool:
        """Whether a kernel runs experts of which it has some inner channels and outputs."""
        spec = self.spec
        codes = GATED_CODE if spec.gated else ACT_CODE
        is_looped = self._is_looped or (not spec.gated and spec.zero_experts)
        return self._kernels.supports_ungated_experts and not is_looped and spec.act in codes

    @property
    def _is_looped(self) -> bool:
        """Whether gated experts have parts that no kernel knows."""
        return self.spec.expert_norm is not None or any(self.spec.softcaps)

    def record(self, is_on: bool) -> None:
        """Keep what the tokens of each step choose, from now on or no longer."""
        self.is_recorded, self.chosen_TK = is_on, None
        if isinstance(self._pack, Experts):
            self._pack.handle.records = is_on

    @property
    def _pack(self) -> PackedExperts:
        return self.experts.pack if isinstance(self.experts, SplitExperts) else self.experts

    def take_chosen(self) -> Tensor | None:
        """The experts that the tokens of the last step chose, of all attention groups: int64
        [T, K]."""
        chosen_TK, self.chosen_TK = self.chosen_TK, None
        handle = self._pack.handle if isinstance(self._pack, Experts) else None
        if chosen_TK is None and handle is not None and (count := handle.take_chosen(0)):
            chosen_N = torch.empty(count, dtype=torch.int32)
            handle.take_chosen(chosen_N.data_ptr())
            chosen_TK = chosen_N.view(-1, self.spec.top_k).long()
        return chosen_TK

    @property
    def _has_kernel(self) -> bool:
        """Whether a kernel runs the experts."""
        return self.spec.gated and not self._is_looped

    def _spread(self, pack: PackedExperts, share: ExpertSplit) -> SplitExperts:
        """On a device, in a way that no step waits for the host."""
        share = replace(share, slots_VE=share.slots_VE.to(self._device))
        return SplitExperts(pack, share, self._groups, self._device.type != "cpu")

    def finish(self) -> None:
        pack = self._packed()
        self.experts = pack if self.share is None else self._spread(pack, self.share)
        if self.share is not None and self.share.inside and not isinstance(pack, Experts):
            raise CheckpointError(
                "no kernel runs parts of these experts; --ep-size as --tp-size works"
            )
        if self.spec.sinks:
            borrows = self._kernels.copies_weights
            sinks = [p.borrow() if borrows else p.take() for p in (self.sink_up, self.sink_down)]
            fmts = tuple(map(self._fmt_of, sinks))
            self._sinks = self._kernels.pack_experts(*sinks, None, None, self.spec.act, fmts)
            self._weight_scale = self.weight_scale.take()
        if self.spec.hash_vocab:
            self._experts_of_token = table = self.experts_of_token.take()
            if int(table.min()) < 0 or int(table.max()) >= self.spec.experts:
                raise CheckpointError(
                    f"the table of experts by token names others than 0 to {self.spec.experts - 1}"
                )
        self._out_bias = self.out_bias.take() if self.spec.out_bias else None
        self._scale_E = self.expert_scale.take() if self.spec.expert_scale else None
        self.correction_E = self.correction.take() if self.spec.correction else None

    def _packed(self) -> PackedExperts:
        is_packed = not self._is_looped and (
            self._has_kernel
            or (self._kernels.supports_ungated_experts and not self.spec.zero_experts)
        )
        copies = is_packed and self._kernels.copies_weights
        weights, fmts, grids = zip(
            *(_take_weights(param, self._fmt_of, copies) for param in (self.up, self.down)),
            strict=True,
        )
        biases = (self.up_bias.take(), self.down_bias.take()) if self.spec.bias else (None, None)
        act = self.spec.act
        if self._is_looped:
            up, down = weights
            norm = None if self.spec.expert_norm is None else self.expert_norm
            return LoopedExperts((up, down), biases, self.spec, norm, self._kernels.pack_linear)
        if self._has_kernel:
            limit = (self.spec.limit, self.spec.limit_after)
            return self._kernels.pack_experts(*weights, *biases, act, fmts, grids, limit)
        if is_packed:
            return self._kernels.pack_experts(*weights, *biases, act, fmts, grids, is_gated=False)
        up, down = weights
        if self.spec.gated:
            return pack_experts(up, down, biases[0], biases[1], act)
        return UngatedExperts(up, down, biases[0], biases[1], act, self._kernels.pack_linear)

    def adapt(self, site: int, step: StepAdapters) -> None:
        """Let adapters change the experts, which are loaded."""
        self.site, self._step = site, step

    @property
    def packed_sites(self) -> dict[int, int]:
        """The site by the ``id`` of what is packed."""
        return {id(self.experts): self.site}

    def run(
        self,
        x_TD: Tensor,
        routed_by_TD: Tensor | None = None,
        batch: ForwardBatch | None = None,
    ) -> Tensor:
        """The feed-forward branch: [T, D]. ``routed_by`` is what the router reads, if not x; a
        deep router and a table of tokens need the ``batch``."""
        router_in_TD = x_TD if routed_by_TD is None else routed_by_TD
        if self.spec.router_norm is not None:
            router_in_TD = self.router_norm.run(router_in_TD)
        if self.spec.deep_router is not None:
            assert batch is not None
            logits_TE = self.deep_router.run_chained(router_in_TD, batch)
        else:
            logits_TE = self.router.run(router_in_TD)
        if self._noise is not None:
            logits_TE = torch.rand(logits_TE.shape, generator=self._noise).to(logits_TE)
        if self.spec.router_softcap:
            logits_TE = self._kernels.softcap(logits_TE, self.spec.router_softcap)
        if self.spec.sinks:
            return self._run_with_sinks(x_TD, logits_TE)
        if self.spec.hash_vocab:
            assert batch is not None
            chosen_TK = self._experts_of_token[batch.token_ids_T]
            weights_TK, ids_TK = route(logits_TE, None, self.spec, chosen_TK=chosen_TK)
        else:
            weights_TK, ids_TK = self._route(logits_TE, self.correction_E, self.spec)
        if self._scale_E is not None:
            weights_TK = weights_TK * self._scale_E[ids_TK]
        if self.spec.width:
            narrow_TD = self.narrow.run(x_TD)
            narrow_TD = (
                narrow_TD if self.spec.width_norm is None else self.width_norm.run(narrow_TD)
            )
            y_TD = self.widen.run(self._run_experts(narrow_TD, weights_TK, ids_TK))
        else:
            y_TD = self._run_experts(x_TD, weights_TK, ids_TK)
        if self.spec.shared is not None:
            shared_TD = self.shared.run(x_TD)
            if self.spec.shared_gate:
                shared_TD = shared_TD * self._kernels.sigmoid(self.shared_gate.run(x_TD))
            y_TD += shared_TD
        if self._out_bias is not None:
            y_TD = (y_TD + self._out_bias).to(y_TD.dtype)
        return y_TD if self.spec.out_norm is None else self.out_norm.run(y_TD)

    def emit(
        self, program: ProgramBuilder, source: int, target: Target, routed_by: int = NOWHERE
    ) -> None:
        """The same as operations of a program; the router reads ``routed_by``, if not the
        source."""
        handles(
            self.spec, "experts", "top_k", "inner", "act", "score", "renorm", "scale",
            "correction", "groups", "group_score", "shared", "shared_gate", "bias", "gated",
            "scale_input", "zero_experts", "zero_experts_are_identity", "out_norm", "jitter",
            "router_norm", "expert_scale", "limit", "limit_after",
        )  # fmt: skip
        sources = (source,) if routed_by == NOWHERE else (source, routed_by)
        with program.of_all_groups(self._groups, target, *sources) as (into, whole):
            self._emit(program, whole[0], into, whole[1] if len(whole) > 1 else NOWHERE)

    def _emit(self, program: ProgramBuilder, source: int, target: Target, routed_by: int) -> None:
        if self.spec.out_norm is None:
            self._emit_sum(program, source, target, routed_by)
            return
        buffer, selected = target.buffer, target.selected
        if target.adds:
            buffer = program.buffer("experts")
        self._emit_sum(program, source, Target(buffer, selected=selected), routed_by)
        self.out_norm.emit(program, buffer, buffer, selected=selected)
        if target.adds:
            scale, dim = target.scale, program.dim
            program.ops.add(x=buffer, y=target.buffer, dim=dim, scale=scale, selected=selected)
        else:
            program.scale_rows(buffer, target.scale, selected)

    def _emit_sum(
        self, program: ProgramBuilder, source: int, target: Target, routed_by: int
    ) -> None:
        """Experts and shared expert."""
        spec, selected, pack = self.spec, target.selected, self._pack
        if not isinstance(pack, Experts):
            raise Unsupported(f"experts as {type(pack).__name__}")
        if self._noise is not None:
            raise Unsupported("noise in place of the router's logits")
        part = self.experts.program_part() if isinstance(self.experts, SplitExperts) else None
        program.keep += [pack, part]
        read = source if routed_by == NOWHERE else routed_by
        if spec.router_norm is not None:
            read = self.router_norm.emit(program, read, program.buffer("routed by"), 0, selected)
        logits = program.project(self.router, read, "router", selected)
        program.ops.moe(
            x=source, logits=logits, y=target.buffer, experts=pack.handle,
            route=self._route_args(program), scale=target.scale, adds=target.adds,
            zero_experts=spec.zero_experts, scales_input=spec.scale_input, selected=selected,
            zero_experts_are_identity=spec.zero_experts_are_identity, part=part,
            site=program.site_of(self.experts),
        )  # fmt: skip
        if spec.shared is None:
            return
        into = Target(target.buffer, True, target.scale, selected)
        if not spec.shared_gate:
            self.shared.emit(program, source, into)
            return
        shared, dim = program.buffer("shared"), program.dim
        self.shared.emit(program, source, Target(shared, False, target.scale, selected))
        gates = program.project(self.shared_gate, source, "shared gate", selected)
        program.gate(gates, shared, (1, dim), "SIGMOID", per_head=True, selected=selected)
        program.ops.add(x=shared, y=target.buffer, dim=dim, selected=selected)

    def _route_args(self, program: ProgramBuilder) -> Any:
        spec = self.spec
        score = getattr(native().RouterScore, spec.score.upper(), None)
        if score is None:
            raise Unsupported(f"Moe.score={spec.score}")
        groups, groups_kept = spec.groups
        return struct(
            "Route", experts=spec.experts + spec.zero_experts, top_k=spec.top_k, score=score,
            renorm=spec.renorm, scale=spec.scale, jitter=spec.jitter, groups=groups,
            groups_kept=groups_kept, group_top2=spec.group_score == "top2",
            correction=program.hold(self.correction_E),
            expert_scale=program.hold(self._scale_E),
        )  # fmt: skip

    def _run_with_sinks(self, x_TD: Tensor, logits_TE: Tensor) -> Tensor:
        """The sum of the chosen experts and of those that every token takes: [T, D]."""
        spec, count = self.spec, self.spec.experts
        scores = self._kernels.sigmoid(logits_TE.float())
        pick = scores[:, :count]
        pick = pick if self.correction_E is None else pick + self.correction_E
        ids_TK = pick.topk(spec.top_k, -1)[1]
        weights = torch.cat((scores.gather(1, ids_TK), scores[:, count:]), -1)
        weights = weights / weights.sum(-1, keepdim=True) * (spec.scale * self._weight_scale)
        chosen, always = (
            t.contiguous() for t in weights.split_with_sizes((spec.top_k, spec.sinks), -1)
        )
        all_TS = torch.arange(spec.sinks, device=x_TD.device).expand(len(x_TD), -1).contiguous()
        y_TD = self._run_experts(x_TD, chosen, ids_TK)
        return y_TD + self._sinks.run(x_TD, always, all_TS)

    def _run_experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """The experts' weighted sum; zero experts return x."""
        spec = self.spec
        if self.is_recorded:  # by all ranks at once
            self.chosen_TK = ids_TK if self._groups is None else self._groups.gather(ids_TK)
        if spec.scale_input:
            ones = torch.ones_like(weights_TK[:, :1])
            parts = [
                self._run_packed(x_TD * weights_TK[:, k : k + 1], ones, ids_TK[:, k : k + 1])
                for k in range(spec.top_k)
            ]
            return sum(parts[1:], parts[0])
        if not spec.zero_experts:
            return self._run_packed(x_TD, weights_TK, ids_TK)
        is_real = ids_TK < spec.experts
        passed = weights_TK.masked_fill(is_real, 0.0).sum(-1, keepdim=True)
        ids = ids_TK.clamp(max=spec.experts - 1)
        if not spec.zero_experts_are_identity:
            return self._run_packed(x_TD, weights_TK * is_real, ids)
        return self._run_packed(x_TD, weights_TK * is_real, ids) + x_TD * passed

    def _run_packed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """The experts that have weights, with what adapters add to them."""
        if self.on_chosen is not None:
            self.on_chosen(ids_TK)
        rows, site = None if self.site < 0 else self._step.rows, self.site
        if self.site >= 0 and self._groups is not None:
            rows = self._groups.lora  # experts see the tokens of all groups
        if rows is None or not (rows.has(site) or rows.has(site + 1)):
            return self.experts.run(x_TD, weights_TK, ids_TK)
        run: Callable[..., Tensor] = self.experts.run
        return run(x_TD, weights_TK, ids_TK, ExpertAdapters(rows, site))


def _take_weights(
    param: Param, fmt_of: Callable[[Tensor], str], copies: bool
) -> tuple[Tensor, str, QuantScales | None]:
    """Weights of experts, their format, and scales where they are whole numbers."""
    grid, param.quantized = param.quantized, None
    if grid is None:
        floats = param.borrow() if copies else param.take()
        return floats, fmt_of(floats), None
    whole = to_kernel_weight(grid)
    return whole.values, whole.fmt, whole.scales


def parts_of(spec: Moe) -> tuple[int, ...]:
    """Rows of an expert's gate and up projections."""
    return (spec.inner,) * (2 if spec.gated else 1)


class DeepRouterLayer(Module):
    """down -> norm -> two layers -> logits; the next block's router reads
    the output of ``down`` too."""

    def __init__(self, moe: Moe, spec: DeepRouter, dim: int, context: LayerContext) -> None:
        self.spec, linear = spec, context.plain_linear
        self.narrow = linear(dim, spec.width, True)
        self.norm = NormLayer(spec.norm, (spec.width,), context.kernels, context.device)
        self.first, self.second = (linear(spec.width, spec.width, True) for _ in range(2))
        self.out = linear(spec.width, moe.experts + moe.zero_experts)
        if spec.chained:
            self.before = Param((spec.width,), "float32")

    def finish(self) -> None:
        self._before_R = self.before.take() if self.spec.chained else None

    def run_chained(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Logits [T, E]."""
        h_TR = self.narrow.run(x_TD)
        if self._before_R is not None:
            assert batch.scratch.router_TR is not None, "the first layer's router is not chained"
            h_TR = (h_TR + batch.scratch.router_TR * self._before_R).to(h_TR.dtype)
        batch.scratch.router_TR = h_TR
        h_TR = F.gelu(self.first.run(self.norm.run(h_TR)))
        return self.out.run(F.gelu(self.second.run(h_TR)))


class LoopedExperts(UngatedExperts):
    """Gated experts whose outputs are normed, or whose gates are capped, one after another."""

    def __init__(
        self,
        weights: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        spec: Moe,
        norm: NormLayer | None,
        pack: Callable[..., PackedLinear],
    ) -> None:
        """``weights`` and ``biases`` of up [E, 2I, D] and down [E, D, I]."""
        super().__init__(*weights, *biases, spec.act, pack)
        self._limit, self._norm = (spec.limit, spec.limit_after), norm
        self._softcaps = spec.softcaps

    def activate(self, h: Tensor) -> Tensor:
        if not any(self._softcaps):
            return activate_gated(h, self._act, *self._limit)
        gate, up = h.float().chunk(2, -1)
        capped, up = (softcap(x, cap) for x, cap in zip((gate, up), self._softcaps, strict=True))
        return (capped * sigmoid(gate) * up).to(h.dtype)

    def norm(self, y: Tensor) -> Tensor:
        return y if self._norm is None else self._norm.run(y)
