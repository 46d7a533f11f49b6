"""Lengths of drafts that follow from the flags, and what is said about flags without effect."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.config.host import HostInfo
from radixlm.config.parser import parse
from radixlm.config.resolve import fill_drafts, resolve
from radixlm.config.server_config import ServerConfig
from radixlm.config.speculate import MAX_STEPS, MAX_TREE
from radixlm.config.states import draft_notes


def filled(architecture: str = "X", **given: Any) -> dict[str, Any]:
    """The values of the options after their lengths were filled in, twice."""
    host = HostInfo("cpu", 2, {"architecture": architecture})
    config = ServerConfig.from_kwargs(
        **{f"speculative_{name}": value for name, value in given.items()}
    )
    for _ in range(2):
        for change in fill_drafts(config, host):
            config = config.with_values({change.name: change.value})
    s = config.speculate
    return {
        "steps": s.speculative_num_steps,
        "tokens": s.speculative_num_draft_tokens,
        "adaptive": s.speculative_adaptive,
        "max": s.max_drafts,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"algorithm": "STANDALONE"}, (3, 4, True, 7)),
        ({"algorithm": "EAGLE3"}, (5, 6, True, 7)),
        ({"algorithm": "NEXTN", "architecture": "DeepseekV3ForCausalLM"}, (3, 4, True, 7)),
        ({"algorithm": "EAGLE", "architecture": "GptOssForCausalLM"}, (3, 4, True, 7)),
        ({"algorithm": "NGRAM"}, (11, 12, True, 15)),
        # numbers that are set are kept
        ({"algorithm": "NGRAM", "num_draft_tokens": 16}, (15, 16, False, 15)),
        ({"algorithm": "NGRAM", "num_draft_tokens": 4, "num_steps": 9}, (3, 4, False, 3)),
        ({"algorithm": "EAGLE", "num_steps": 3}, (3, 4, False, 3)),
        # with topk 1, as the reference, a chain of so many steps; else a tree of so many tokens
        (
            {"algorithm": "EAGLE", "num_steps": 5, "eagle_topk": 1, "num_draft_tokens": 8},
            (5, 6, False, 5),
        ),
        (
            {"algorithm": "EAGLE", "num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16},
            (5, 16, False, 5),
        ),
        ({"algorithm": "EAGLE3", "num_steps": 4, "eagle_topk": 2}, (4, 8, False, 4)),
        ({"algorithm": "EAGLE3", "eagle_topk": 4}, (5, 8, True, 7)),
        ({"algorithm": "EAGLE3", "eagle_topk": 4, "num_draft_tokens": 9}, (5, 9, False, 5)),
        # no more than the steps make, and than a row of logits each is worth
        (
            {"algorithm": "EAGLE", "num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 50},
            (2, 7, False, 2),
        ),
        (
            {"algorithm": "EAGLE", "num_steps": 6, "eagle_topk": 8, "num_draft_tokens": 500},
            (6, MAX_TREE, False, 6),
        ),
        ({"algorithm": "EAGLE3", "num_draft_tokens": 8}, (7, 8, False, 7)),
        ({"algorithm": "EAGLE", "num_steps": 99}, (MAX_STEPS, MAX_STEPS + 1, False, MAX_STEPS)),
        ({"algorithm": "EAGLE", "num_steps": 3, "adaptive": True}, (3, 4, True, 7)),
        ({"algorithm": "EAGLE", "num_steps": 9, "adaptive": True}, (9, 10, True, 9)),
        ({"algorithm": "NGRAM", "num_draft_tokens": 1}, (1, 2, False, 1)),
        # one step makes a block of so many tokens
        ({"algorithm": "DFLASH"}, (15, 16, True, 15)),
        ({"algorithm": "DFLASH", "num_steps": 1, "eagle_topk": 1}, (15, 16, True, 15)),
        ({"algorithm": "DFLASH", "num_steps": 1, "num_draft_tokens": 8}, (7, 8, False, 7)),
        ({"algorithm": "DFLASH", "eagle_topk": 4, "num_draft_tokens": 8}, (7, 8, False, 7)),
        ({"algorithm": "DSPARK"}, (7, 8, True, 7)),
        ({}, (None, None, False, 7)),
    ],
)
def test_lengths(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert tuple(filled(**given).values()) == expected


def test_nothing_is_filled_in_before_the_model_is_known() -> None:
    config = ServerConfig.from_kwargs(speculative_algorithm="NGRAM")
    assert not list(fill_drafts(config, HostInfo("cpu", 2)))


@pytest.mark.parametrize("name", ["accept_threshold_single", "accept_threshold_acc"])
def test_lossy_acceptance_is_refused(name: str) -> None:
    flag = f"--speculative-{name.replace('_', '-')}"
    words = ["--speculative-algorithm", "NGRAM", flag]
    host = HostInfo("cpu", 2)
    config, given = parse([*words, "0.9"])
    with pytest.raises(ConfigError, match=rf"{flag} 0\.9 .* changes answers.*default: 1\.0"):
        resolve(config, host, given)
    resolve(*(lambda pair: (pair[0], host, pair[1]))(parse([*words, "1.0"])))


@pytest.mark.parametrize(("algorithm", "is_chain"), [("NGRAM", True), ("EAGLE3", False)])
def test_only_draft_models_draft_trees(
    algorithm: str, is_chain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config, given = parse(["--speculative-algorithm", algorithm, "--speculative-eagle-topk", "4"])
    resolve(config, HostInfo("cpu", 2), given)
    assert ("--speculative-eagle-topk has no effect" in caplog.text) == is_chain


def test_flags_of_another_drafter_are_named() -> None:
    ngram = ServerConfig.from_kwargs(
        speculative_algorithm="NGRAM", speculative_draft_model_path="/models/draft"
    )
    (note,) = draft_notes(ngram)
    assert note == (
        "--speculative-draft-model-path has no effect: --speculative-algorithm is NGRAM"
    )
    other = ServerConfig.from_kwargs(
        speculative_algorithm="EAGLE", speculative_ngram_capacity=5, speculative_num_steps=3
    )
    (note,) = draft_notes(other)
    assert "--speculative-ngram-capacity has no effect" in note
    assert not list(draft_notes(ServerConfig()))
