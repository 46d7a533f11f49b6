"""HiddenNeeds: which hidden states a target model leaves for a drafter."""

from radixlm.base.record import Record


class HiddenNeeds(Record):
    """The hidden states of the target model that a drafter reads: what leaves the layers with these
    indices (-1: the embedding), and what leaves the last norm. They are concatenated in this order
    along the width. ``is_mean``: of several residual streams their mean, else all."""

    layers: tuple[int, ...] = ()
    final: bool = False
    is_mean: bool = False
