"""The drafters of an engine that run on its host, their corpora, and the rule of lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from radixlm.arch.spec import Decoder
from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.config.server_config import ServerConfig
from radixlm.engine.model_info import ModelInfo
from radixlm.scheduler.hooks import Hooks
from radixlm.scheduler.kv_cache_manager import KVCacheManager
from radixlm.scheduler.limits import Limits
from radixlm.speculative.corpus import read_corpus, tokens_of
from radixlm.speculative.costs import CostTable
from radixlm.speculative.drafting import Drafting
from radixlm.speculative.lengths import DraftLength
from radixlm.speculative.ngram import NgramDrafter, NgramOptions
from radixlm.speculative.trees import TreeShape
from radixlm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LoadTokenizer = Callable[[], Tokenizer] | None
# cost of one token more in a step, over that of one token, before it was measured; and of a step of
# a draft model
CPU_SLOPE, GPU_SLOPE, DRAFT_SHARE = 0.08, 0.002, 0.1
MAX_PATHS = 256  # further paths of trees of drafts in a step
OWN_DRAFTS = 7  # of requests that draft by themselves (a prediction, a grammar)


def max_drafts(config: ServerConfig, depth: int, decoder: Decoder) -> int:
    """Most drafted tokens of a row; 0 where a step of several tokens of a row gives other numbers
    than as many steps, or is not built: recurrent layers on a GPU, and overlapped steps."""
    reason = "" if verifies_drafts(config, decoder) else "recurrent layers on a GPU"
    reason = reason or ("steps overlap" if depth else "")
    if config.speculate.speculative_algorithm is None:
        return 0 if reason else OWN_DRAFTS
    if reason:
        log.warning("no drafts are verified: %s", reason)
    return 0 if reason else config.speculate.max_drafts


def verifies_drafts(config: ServerConfig, decoder: Decoder) -> bool:
    """Whether steps of several tokens of a row give the numbers of as many steps: recurrences do
    not on a GPU, where they run in chunks."""
    has_states = any(block.state is not None for block in decoder.blocks)
    return not (has_states and config.execute.device == "cuda")


def tree_shape(config: ServerConfig, decoder: Decoder, modules: int = 1) -> TreeShape | None:
    """The trees of the draft model; None where it drafts chains. ``modules``: that draft."""
    s, branches = config.speculate, config.speculate.speculative_eagle_topk or 1
    if branches == 1 or not s.uses_device_drafter or why_chains(config, decoder, modules):
        return None
    return TreeShape(branches, (s.speculative_num_draft_tokens or 2) - 1, s.max_drafts)


def why_chains(config: ServerConfig, decoder: Decoder, modules: int) -> str:
    """Why a draft model cannot draft trees, or ""."""
    if any(block.state is not None for block in decoder.blocks):
        return "a recurrent state is that of one path"
    if config.parallel.pp_size > 1:
        return "pipeline stages verify one path"
    return "the draft has several modules" if modules > 1 else ""


def max_paths(tree: TreeShape | None, max_running: int) -> int:
    """Paths besides the first that a step verifies at most."""
    return 0 if tree is None else min(MAX_PATHS, max_running * (tree.size - 1))


def make_ngram(
    config: ServerConfig, info: ModelInfo, tokenizer: LoadTokenizer
) -> NgramDrafter | None:
    """The drafter of NGRAM with its corpus, None for other algorithms."""
    s = config.speculate
    if s.speculative_algorithm != "NGRAM":
        return None
    options = NgramOptions(
        min_match=s.speculative_ngram_min_match_window_size,
        depth=s.speculative_ngram_max_trie_depth,
        by_frequency=s.speculative_ngram_match_type == "PROB",
        capacity=s.speculative_ngram_capacity,
        max_corpus_tokens=s.speculative_ngram_external_corpus_max_tokens,
        corpus_budget=s.speculative_ngram_external_sam_budget,
    )
    drafter = NgramDrafter(options, info.decoder.vocab)
    if path := s.speculative_ngram_external_corpus_path:
        flag = "--speculative-ngram-external-corpus-path"
        if tokenizer is None:
            raise ConfigError(f"{flag} needs a tokenizer: leave out --skip-tokenizer-init")
        try:
            count = drafter.add_corpus(path, tokens_of(read_corpus(path), tokenizer()))
        except (OSError, ValueError, InvalidRequest) as error:
            raise ConfigError(f"{flag} {path}: {error}") from error
        log.info("corpus %s: %d tokens", path, count)
    return drafter


def corpus_commands(drafter: NgramDrafter | None) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Operators' commands about corpora, by verb; ``ids`` of a corpus are int32 bytes."""

    def ngram() -> NgramDrafter:
        if drafter is None:
            raise InvalidRequest("corpora need --speculative-algorithm NGRAM")
        return drafter

    def add(args: dict[str, Any]) -> int:
        return ngram().add_corpus(args["corpus_id"], np.frombuffer(args["ids"], "<i4"))

    def remove(args: dict[str, Any]) -> None:
        ngram().remove_corpus(args["corpus_id"])

    def counts(args: dict[str, Any]) -> dict[str, int]:
        return dict(ngram().corpora)

    return {"add_corpus": add, "remove_corpus": remove, "list_corpora": counts}


def make_drafting(
    config: ServerConfig,
    limits: Limits,
    kv_manager: KVCacheManager,
    hooks: Hooks,
    drafter: NgramDrafter | None,
) -> Drafting | None:
    """What asks the drafters; without an algorithm only predictions and grammars draft. None where
    no draft can be verified."""
    if not limits.max_drafts:
        return None
    s = config.speculate
    slope = GPU_SLOPE if config.execute.device == "cuda" else CPU_SLOPE
    share = DRAFT_SHARE if s.uses_device_drafter else 0.0
    is_fixed = s.speculative_num_steps is not None and not s.speculative_adaptive
    lengths = DraftLength(limits.max_drafts, is_fixed, CostTable(slope, share))
    return Drafting(limits, kv_manager, hooks, lengths, drafter, s.uses_device_drafter)
