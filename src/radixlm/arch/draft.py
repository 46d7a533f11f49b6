"""What a draft model for speculative decoding is: layers that guess further tokens from the hidden
states of a target model.

EAGLE heads (arXiv:2401.15077, 2503.01840) are checkpoints of their own; multi-token-prediction
layers (MTP, NextN) are in the target's checkpoint. Both read the next token's embedding and the
target's hidden state, each normalized, concatenated along the channels and projected to the
draft's width.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from radixlm.arch.names import AnyOf, Name, Named
from radixlm.arch.spec import Decoder, Norm
from radixlm.base.record import Record, replace

STEP = "{step}"  # in a tensor name: the number of the module; each guesses one token further


class MaskedBlock(Record):
    """One step drafts several tokens: the last known token and ``mask`` tokens behind it see each
    other, and for each token before them an entry that is made of the target's hidden states of
    that token (DFlash, DSpark)."""

    size: int  # tokens of a block
    mask: int  # the token id of a mask
    tells_next: bool = False  # a place tells the token behind it, else the token at it
    norms_entries: bool = False  # the hidden states pass the first norm of each layer
    # the token before a draft adds to its logits: by its row of a table of ``markov_rank``
    # channels; gated: by hidden state and row; rnn: by a state that goes along the block
    markov: Literal["", "vanilla", "gated", "rnn"] = ""
    markov_rank: int = 0
    # the same by a bilinear form of rank ``selector_rank``, of the best so many tokens of a place
    # alone (DFlash 2)
    selector_rank: int = 0
    num_candidates: int = 0
    # what goes into and comes out of each branch of a layer is convolved along the block: so many
    # tokens, and channels of a group, which have one factor that the block's own hidden states add
    conv_taps: int = 0
    conv_group: int = 0
    embed_scale: float = 1.0  # of the embeddings of a block's tokens

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.size - (not self.tells_next)


class ResidualLayers(Record):
    """Linear layers with SiLU around each of which the residual goes (Medusa)."""

    count: int
    bias: bool = True


class TokenState(Record):
    """A state that each token goes into (MLP speculators, arXiv:2404.19124): the first is the
    target's last hidden state, normalized if ``norms_first``."""

    token_weight: float  # of the token's embedding beside the projected state
    norms_first: bool = False


class Draft(Record):
    """One or more modules of the same shape, each with its own weights.

    ``decoder`` has the blocks of a module, its last norm (of kind "none" where it has none) and its
    head; the token table is the target's unless ``owns_table``, and so is the head unless
    ``owns_head``. Further roles: draft.{join embed_norm hidden_norm taps taps_norm tap_norms.0 ...
    vocab}; with several residual streams, join_embed and join_hidden (of each stream), which are
    added. Names may hold ``{step}``: see ``at_step``.
    """

    decoder: Decoder
    modules: int = 1
    first: int = 0  # what ``{step}`` is for the first module
    order: Literal["embed hidden", "hidden embed"] = "embed hidden"
    embed_norm: Norm | None = None
    hidden_norm: Norm | None = None
    # False: the first block's attention reads the concatenation, the residual is the hidden state
    is_projected: bool = True
    residual_is_normed: bool = False  # then: the residual is the normalized hidden state
    join_bias: bool = False
    target_dim: int = 0  # width of the target's hidden states; 0 = the draft's
    target_vocab: int = 0  # tokens of the target, where the draft's vocabulary is smaller
    # hidden states of so many target layers are concatenated and projected; 0: it reads the
    # target's last hidden state, after the final norm
    taps: int = 0
    # the target layers whose outputs they are, "-1" the embedding; () = see ``tapped_layers``
    tap_layers: tuple[Annotated[int, "may be negative"], ...] = ()
    taps_norm: Norm | None = None  # of the concatenated hidden states
    tap_norm: Norm | None = None  # then of each by itself
    passes_normed: bool = True  # its next step reads its hidden state after the last norm
    owns_head: bool = False
    owns_table: bool = False  # in a description: if its files have one
    # it reads the target's last hidden state before the final norm; of several residual streams all
    before_norm: bool = False
    norms_all_streams: bool = False  # the norm of the hidden state is of all streams together
    has_vocab_map: bool = False  # draft token t is target token t + map[t]
    blanks_first: bool = False  # the embedding of the second token is zero
    # it has no keys and values: its layers read those of the target's last layers of their kinds.
    # Role draft.back: from its hidden state to what its next step reads in place of the target's
    reads_target: bool = False
    # its head reads only the tokens of the best of so many clusters: how many there are, how many
    # are read. Roles draft.{centroids token_ordering table}
    clusters: tuple[int, int] = (0, 0)
    # all drafts are made in one step: this token stands for each but the last one (P-EAGLE). Role
    # draft.mask_hidden: what it has for hidden states of the target
    mask: int | None = None
    # without blocks: each module reads the target's last hidden state. Roles draft.residual.0 ...
    layers: ResidualLayers | None = None
    # likewise: the first module reads the target's last hidden state, each further one what the one
    # before leaves. Roles draft.{project state_norm}
    state: TokenState | None = None
    # drafts all tokens in one step. Roles draft.markov.{table out gate joint}, draft.selector.
    # {before token hidden}; by layer conv1.{base factors} of the mixer, conv2 of the feed-forward
    block: MaskedBlock | None = None


def tapped_layers(draft: Draft, num_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs the draft reads: those of its config, else one of the first,
    one in the middle and one near the end, as EAGLE-3's authors chose them; or the last one."""
    if draft.before_norm:
        return (num_layers - 1,)
    return draft.tap_layers or (1, num_layers // 2 - 1, num_layers - 4) if draft.taps else ()


def taps_mean(draft: Draft) -> bool:
    """Whether it reads the mean of a target's residual streams."""
    return draft.block is not None and num_streams(draft.decoder) > 1


def join_role(draft: Draft) -> str:
    """The role of the projection of hidden states."""
    return "draft.join" if num_streams(draft.decoder) == 1 else "draft.join_hidden"


def num_streams(decoder: Decoder) -> int:
    """Residual streams between the blocks."""
    streams = decoder.streams or decoder.gated_streams
    return 1 if streams is None else streams.count


def at_step(draft: Draft, step: int) -> Decoder:
    """The decoder of module ``step`` (0 is the first), with the names that its tensors have."""
    number = str(draft.first + step)
    names: dict[str, Any] = dict(draft.decoder.names)
    filled = {role: renamed(name, STEP, number) for role, name in names.items()}
    return replace(draft.decoder, names=filled)


def renamed(name: Name, old: str, new: str) -> Name:
    """The same name with ``old`` replaced in every template."""
    match name:
        case AnyOf():
            return AnyOf(*(renamed(one, old, new) for one in name.spellings))
        case Named():
            return Named(tuple(t.replace(old, new) for t in name.templates), name.recipe)
        case str():
            return name.replace(old, new)
        case _:
            return tuple(template.replace(old, new) for template in name)
