"""What every layer is built with."""

import torch

from radixlm.base.record import Record, field, replace
from radixlm.distributed.attention_groups import AttentionGroups
from radixlm.distributed.groups import ALONE, SOLO, Group, Ranks
from radixlm.kernels.dispatch import Kernels
from radixlm.layers.linear import Linear
from radixlm.layers.placement import Bounds, Placement, evenly
from radixlm.quant.param import Shard
from radixlm.quant.scheme import HeadScheme, Scheme


class LayerContext(Record):
    """``compute_dtype`` is the dtype of activations; ``scheme`` stores linear weights; ``ranks``
    share the layers."""

    kernels: Kernels
    device: torch.device
    compute_dtype: torch.dtype
    scheme: Scheme = field(default_factory=Scheme)
    ranks: Ranks = ALONE
    cuts_heads: bool = True  # else each rank has all heads of an attention
    cuts_kv_heads: bool = True  # else the queries of a KV head stay on one rank
    attention_groups: AttentionGroups | None = None  # with data-parallel attention
    cuts_dense: bool = True  # else each rank has the dense feed-forwards of blocks whole
    cuts_output_head: bool = True  # else each rank has the whole output head

    @property
    def of_dense(self) -> "LayerContext":
        """The context of a block's dense feed-forward."""
        return self if self.cuts_dense else replace(self, ranks=ALONE, attention_groups=None)

    @property
    def head_group(self) -> Group:
        """The ranks among which the output head is cut."""
        groups = self.attention_groups
        if not self.cuts_output_head:
            return SOLO
        return self.ranks.attn if groups is not None and groups.splits_head else self.ranks.tp

    def after(self, inputs: Bounds, in_features: int, out_features: int) -> Placement | None:
        """Of a layer whose inputs the ranks that share the attention have in parts; () for none."""
        if not inputs:
            return None
        place = self.evenly(in_features, out_features)
        return replace(place, group=self.ranks.attn, inputs=inputs)

    def linear(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        shard: Shard | None = None,
        gate_act: str = "",
        place: Placement | None = None,
    ) -> Linear:
        """A linear layer in this context's scheme; ``gate_act`` as in ``Linear``. Without a
        ``place``, the ranks that share the attention each compute some outputs, and all get all."""
        if place is None:
            place = self.evenly(in_features, out_features, 2 if gate_act else 1)
        return Linear(
            in_features, out_features, bias, self.scheme, self.kernels, shard, gate_act, place
        )

    def evenly(
        self, in_features: int, rows: int, num_parts: int = 1, group: Group | None = None
    ) -> Placement:
        """An even division of the outcomes of ``num_parts`` joined matrices among a group, by
        default those that share the attention."""
        together = self.scheme.rows_together(in_features)
        return evenly(rows // num_parts, group or self.ranks.attn, together, num_parts)

    def head_linear(self, in_features: int, out_features: int, bias: bool = False) -> Linear:
        """The output head, in the format that the scheme has for it."""
        scheme = HeadScheme(self.scheme.head_fmt, self.scheme.head_storage)
        place = evenly(out_features, self.head_group, scheme.rows_together(in_features))
        place = replace(place, to_first=True)
        return Linear(in_features, out_features, bias, scheme, self.kernels, place=place)

    def plain_linear(
        self, in_features: int, out_features: int, bias: bool = False, shard: Shard | None = None
    ) -> Linear:
        """A linear layer that is never quantized and whole on each rank (routers, gates)."""
        return Linear(in_features, out_features, bias, Scheme(), self.kernels, shard)
