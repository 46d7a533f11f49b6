"""Draft models and the verification of drafts."""

from dataclasses import dataclass
from typing import Annotated

from radixlm.config.flag import NON_NEGATIVE, POSITIVE, Flag, Group, no_op

BLOCK_DRAFTS = ("DFLASH", "DSPARK")
HEADS = ("EAGLE", "EAGLE3", "NEXTN", *BLOCK_DRAFTS, "MEDUSA", "MLP_SPECULATOR")
"""Algorithms whose drafts read hidden states of the model, and use its output head."""
ALGORITHMS = (*HEADS, "STANDALONE", "NGRAM")
"""All but NGRAM have a draft model, on the device of the model."""

MAX_STEPS = 31
"""Longest draft: rows of verified tokens have logits each."""

_ALGORITHM = ("speculative_algorithm",)
_DETAIL = Flag(part_of=_ALGORITHM)
_COUNT = Flag(within=POSITIVE, part_of=_ALGORITHM)
_LOSSY = "an acceptance that changes answers: at 1.0 they are those of a run without drafts"
_CHAIN = "NGRAM drafts chains of tokens"
MAX_TREE = 64
"""Most tokens of a tree of drafts: a row of logits each."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SpeculateConfig(Group):
    """Speculative decoding."""

    speculative_algorithm: Annotated[
        str | None,
        "Method that drafts tokens.",
        # what SGLang makes of assistants of Gemma 4
        Flag(choices=ALGORITHMS, old_values=(("FROZEN_KV_MTP", "NEXTN"),)),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        "Folder of the draft model, or its name on a hub. Default: prediction layers of the "
        "model's own checkpoint, or the drafts that are bundled with it.",
        Flag(("--speculative-draft-model",), part_of=_ALGORITHM),
    ] = None
    speculative_draft_model_quantization: Annotated[
        str | None,
        "Quantization of a draft model whose checkpoint has floats: a value of --quantization, or "
        "unquant. Default: --quantization; without it int8wo on a CPU, for 512 channels and more.",
        Flag(part_of=_ALGORITHM),
    ] = None
    speculative_draft_load_format: Annotated[
        str | None,
        "--load-format of the draft model. Default: --load-format.",
        Flag(part_of=_ALGORITHM),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None,
        "Branch, tag or commit of a draft model that is given by name.",
        Flag(part_of=_ALGORITHM),
    ] = None
    speculative_num_steps: Annotated[
        int | None,
        "Tokens of a draft. A number that is set is drafted, or nothing; without one the length "
        "follows cost and acceptance.",
        _COUNT,
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        "Tokens that a draft model tries behind each of as many drafts of a step; above 1, drafts "
        "are trees.",
        Flag(within=POSITIVE, part_of=_ALGORITHM),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        "Tokens that are verified together: the draft, a chain or a tree, and the token before it.",
        _COUNT,
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        "Accept a draft token whose probability exceeds this.",
        Flag(within="[0, 1]", state="planned", needs=_LOSSY, part_of=_ALGORITHM),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        "Accept with probability min(1, p / this).",
        Flag(within="(0, 1]", state="planned", needs=_LOSSY, part_of=_ALGORITHM),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None,
        "File of torch with a list of token ids, or org/repository/file on a hub: EAGLE and NEXTN "
        "draft these alone, with the head cut to their rows.",
        Flag(part_of=_ALGORITHM),
    ] = None
    speculative_attention_mode: Annotated[
        str,
        "Attention backend that verifies drafts.",
        Flag(
            choices=("prefill", "decode"),
            built=("prefill",),
            why="drafts are verified in the rows that decode",
            part_of=_ALGORITHM,
        ),
    ] = "prefill"
    speculative_adaptive: Annotated[
        bool,
        "Choose the length of drafts by cost and acceptance, also if --speculative-num-steps is "
        "set. Default: only if no number is set.",
        _DETAIL,
    ] = False
    speculative_adaptive_config: Annotated[
        str | None, "File with candidate lengths.", no_op("any length may be chosen")
    ] = None
    speculative_ngram_capacity: Annotated[
        int,
        "Tokens of finished answers that NGRAM keeps, of all namespaces together; 0: it drafts "
        "from a request's own text alone.",
        Flag(within=NON_NEGATIVE, part_of=_ALGORITHM),
    ] = 10_000_000
    speculative_ngram_min_match_window_size: Annotated[
        int, "Tokens that must match before NGRAM drafts.", _COUNT
    ] = 2
    speculative_ngram_max_match_window_size: Annotated[
        int, "Longest match that is looked for.", no_op("matches are as long as they are", POSITIVE)
    ] = 12
    speculative_ngram_max_trie_depth: Annotated[
        int,
        "Tokens of a prompt's end that NGRAM keeps before its answer.",
        Flag(("--speculative-ngram-branch-length",), within=POSITIVE, part_of=_ALGORITHM),
    ] = 18
    speculative_ngram_match_type: Annotated[
        str,
        "Which continuation of the longest matches NGRAM follows: the latest (BFS) or the most "
        "frequent (PROB).",
        Flag(choices=("BFS", "PROB"), part_of=_ALGORITHM),
    ] = "BFS"
    speculative_ngram_min_bfs_breadth: Annotated[
        int, "Least branches of a draft.", no_op(_CHAIN, POSITIVE)
    ] = 1
    speculative_ngram_max_bfs_breadth: Annotated[
        int, "Most branches of a draft.", no_op(_CHAIN, POSITIVE)
    ] = 10
    speculative_ngram_external_corpus_path: Annotated[
        str | None, "JSONL file, a text a line, that NGRAM drafts from.", _DETAIL
    ] = None
    speculative_ngram_external_corpus_max_tokens: Annotated[
        int, "Tokens of all corpora together.", _COUNT
    ] = 10_000_000
    speculative_ngram_external_sam_budget: Annotated[
        int,
        "Most tokens of a draft that comes from a corpus; 0: no limit.",
        Flag(within=NON_NEGATIVE, part_of=_ALGORITHM),
    ] = 0

    @property
    def uses_device_drafter(self) -> bool:
        """Whether a draft model runs beside the model."""
        return self.speculative_algorithm not in (None, "NGRAM")

    @property
    def max_drafts(self) -> int:
        """Most drafted tokens of a row: the number that is set, or the most that may be chosen."""
        steps = self.speculative_num_steps or 0
        if self.speculative_algorithm is not None and steps and not self.speculative_adaptive:
            return steps
        return max(15 if self.speculative_algorithm == "NGRAM" else 7, steps)
