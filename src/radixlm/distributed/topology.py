"""Which rank does what: coordinates and groups of the ranks of one replica. Pure numbers, no torch.

World rank = stage * tp + tp rank, as in SGLang and Megatron. A stage is a range of layers; its tp
ranks share each of these layers. The tp ranks of a stage are divided in two more ways:

    attention   tp = attn_dp groups of attn_tp = tp / attn_dp ranks (data-parallel attention)
    experts     tp = ep parts of moe_tp = tp / ep ranks (expert-parallel)
"""

from collections.abc import Sequence

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record

WorldRanks = tuple[tuple[int, ...], ...]


class Place(Record):
    """The coordinates of one rank."""

    rank: int = 0
    tp_rank: int = 0
    tp: int = 1
    stage: int = 0
    pp: int = 1
    attn_dp_rank: int = 0
    attn_tp_rank: int = 0
    attn_tp: int = 1
    ep_rank: int = 0
    ep: int = 1
    moe_tp_rank: int = 0
    moe_tp: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1


class Topology(Record):
    """Sizes of the parallel dimensions of one replica. ``dense_tp`` 0 stands for ``tp``."""

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    ep: int = 1
    dense_tp: int = 0
    nnodes: int = 1

    def __post_init__(self) -> None:
        for flag, parts, whole, of in (
            ("--dp-size (with --enable-dp-attention)", self.attn_dp, self.tp, "--tp-size"),
            ("--ep-size", self.ep, self.tp, "--tp-size"),
            ("--moe-dense-tp-size", self.dense_tp or 1, self.tp, "--tp-size"),
            ("--nnodes", self.nnodes, self.world, "--tp-size times --pp-size"),
        ):
            if parts < 1 or whole % parts:
                works = [n for n in range(1, whole + 1) if whole % n == 0]
                nearest = min(works, key=lambda n: abs(n - parts))
                raise ConfigError(
                    f"{flag} {parts} does not divide {of} = {whole}: {nearest} does, or {parts} "
                    f"with {of} = {-(-whole // parts) * parts}"
                )

    @property
    def world(self) -> int:
        return self.tp * self.pp

    @property
    def attn_tp(self) -> int:
        return self.tp // self.attn_dp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    def place(self, rank: int) -> Place:
        """The coordinates of world rank ``rank``."""
        stage, tp_rank = divmod(rank, self.tp)
        attn_dp_rank, attn_tp_rank = divmod(tp_rank, self.attn_tp)
        ep_rank, moe_tp_rank = divmod(tp_rank, self.moe_tp)
        return Place(
            rank=rank,
            tp_rank=tp_rank,
            tp=self.tp,
            stage=stage,
            pp=self.pp,
            attn_dp_rank=attn_dp_rank,
            attn_tp_rank=attn_tp_rank,
            attn_tp=self.attn_tp,
            ep_rank=ep_rank,
            ep=self.ep,
            moe_tp_rank=moe_tp_rank,
            moe_tp=self.moe_tp,
        )

    @property
    def tp_groups(self) -> WorldRanks:
        """The ranks that share each layer, one group a stage."""
        return self._runs(self.tp)

    @property
    def stage_chains(self) -> WorldRanks:
        """The ranks that hand hidden rows to each other, one chain a tp rank."""
        return tuple(tuple(range(r, self.world, self.tp)) for r in range(self.tp))

    @property
    def attn_groups(self) -> WorldRanks:
        """The ranks that share the attention heads of one DP group."""
        return self._runs(self.attn_tp)

    @property
    def expert_groups(self) -> WorldRanks:
        """The ranks that together hold all experts, one part of each: they exchange tokens."""
        return tuple(
            tuple(range(stage * self.tp + r, (stage + 1) * self.tp, self.moe_tp))
            for stage in range(self.pp)
            for r in range(self.moe_tp)
        )

    @property
    def expert_tp_groups(self) -> WorldRanks:
        """The ranks that share the inside of the same experts."""
        return self._runs(self.moe_tp)

    @property
    def groups(self) -> dict[str, WorldRanks]:
        """All groups by kind, as the fields of ``Ranks`` are called."""
        return {
            "world": (tuple(range(self.world)),),
            "tp": self.tp_groups,
            "attn": self.attn_groups,
            "experts": self.expert_groups,
            "expert_tp": self.expert_tp_groups,
            "stages": self.stage_chains,
        }

    def node_of(self, rank: int) -> int:
        """The node of a rank: each has as many, in order."""
        return rank // (self.world // self.nnodes)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The world ranks of a node, ascending."""
        return tuple(r for r in range(self.world) if self.node_of(r) == node)

    def _runs(self, size: int) -> WorldRanks:
        return tuple(tuple(range(r, r + size)) for r in range(0, self.world, size))


def bounds(total: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """``parts + 1`` cut points of ``range(total)``; inner ones are multiples of ``multiple``.

    The parts differ by at most one ``multiple``, larger parts first; a part may be empty.
    """
    each, more = divmod(-(-total // multiple), parts)
    return tuple(min(total, (r * each + min(r, more)) * multiple) for r in range(parts + 1))


def refuse_too_many_ranks(num_ranks: int, heads: Sequence[int]) -> None:
    """ConfigError for more ranks than attention ``heads`` that share them, of a model's layers."""
    if heads and num_ranks > max(heads):
        raise ConfigError(
            f"--tp-size: {num_ranks} ranks cannot share the model's {max(heads)} attention heads; "
            f"{max(heads)} ranks can"
        )
