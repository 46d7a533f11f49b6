"""Draft models and the verification of drafts."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import POSITIVE, Flag, Group

_DRAFTS = "drafters and tree verification"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SpeculateConfig(Group):
    """Speculative decoding."""

    speculative_algorithm: Annotated[
        str | None,
        "Method that drafts tokens.",
        Flag(
            choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
            built=(),
            needs=_DRAFTS,
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        "Folder of the draft model.",
        Flag(
            ("--speculative-draft-model",),
            state="planned",
            needs=_DRAFTS,
            part_of=("speculative_algorithm",),
        ),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None,
        "Branch, tag or commit of the draft model.",
        Flag(state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = None
    speculative_num_steps: Annotated[
        int | None,
        "Draft steps.",
        Flag(within=POSITIVE, state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        "Branches of each draft step.",
        Flag(within=POSITIVE, state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        "Draft tokens that are verified together.",
        Flag(within=POSITIVE, state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        "Accept a draft token whose probability exceeds this.",
        Flag(within="[0, 1]", state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        "Accept with probability min(1, p / this).",
        Flag(within="(0, 1]", state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None,
        "File with the reduced vocabulary of the draft model.",
        Flag(state="planned", needs=_DRAFTS, part_of=("speculative_algorithm",)),
    ] = None
    speculative_attention_mode: Annotated[
        str,
        "Attention backend that verifies drafts.",
        Flag(
            choices=("prefill", "decode"),
            built=("prefill",),
            needs=_DRAFTS,
            part_of=("speculative_algorithm",),
        ),
    ] = "prefill"
