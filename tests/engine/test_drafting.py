"""The host drafters of an engine: options, corpora and their commands, and what cannot draft."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixlm.base.errors import ConfigError, InvalidRequest, NotFound
from radixlm.config.server_config import ServerConfig
from radixlm.engine.drafting import corpus_commands, make_ngram, max_drafts
from radixlm.engine.model_info import ModelInfo, read_model
from radixlm.speculative.corpus import read_corpus, tokens_of
from radixlm.speculative.text_index import SEPARATOR
from radixlm.text.tokenizer import Tokenizer
from tests.fakes.tiny_checkpoint import cached_tiny

INFO = cast(ModelInfo, SimpleNamespace(decoder=SimpleNamespace(vocab=300)))


class Letters:
    """A tokenizer of bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())


def letters() -> Tokenizer:
    return cast(Tokenizer, Letters())


def ngram_config(**options: Any) -> ServerConfig:
    named = {f"speculative_ngram_{name}": value for name, value in options.items()}
    return ServerConfig.from_kwargs(speculative_algorithm="NGRAM", **named)


def corpus(folder: Path, *texts: Any) -> str:
    path = folder / "corpus.jsonl"
    path.write_text("\n\n".join(json.dumps(text) for text in texts))
    return str(path)


def test_options_reach_the_drafter() -> None:
    config = ngram_config(
        min_match_window_size=3,
        branch_length=9,
        match_type="PROB",
        capacity=77,
        external_corpus_max_tokens=5,
        external_sam_budget=4,
    )
    drafter = make_ngram(config, INFO, None)
    assert drafter is not None
    o = drafter.options
    assert (o.min_match, o.depth, o.by_frequency, o.capacity) == (3, 9, True, 77)
    assert (o.max_corpus_tokens, o.corpus_budget, drafter.vocab_size) == (5, 4, 300)
    assert make_ngram(ServerConfig(), INFO, None) is None


def test_a_corpus_is_read_at_start(tmp_path: Path) -> None:
    path = corpus(tmp_path, "abc", "", "de")
    drafter = make_ngram(ngram_config(external_corpus_path=path), INFO, letters)
    assert drafter is not None
    assert drafter.corpora == {path: 6}
    assert tokens_of(read_corpus(path), letters()).tolist() == [97, 98, 99, SEPARATOR, 100, 101]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ('"a"\n{', "line 2 is no JSON"),
        ('{"text": "a"}', 'line 1 is no JSON string; "a text" works'),
        ("", "hold no token"),
    ],
)
def test_a_bad_corpus_stops_the_start(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        make_ngram(ngram_config(external_corpus_path=str(path)), INFO, letters)
    assert str(caught.value).startswith("--speculative-ngram-external-corpus-path")


def test_a_corpus_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --skip-tokenizer-init"):
        make_ngram(ngram_config(external_corpus_path=corpus(tmp_path, "a")), INFO, None)


def test_commands() -> None:
    commands = corpus_commands(make_ngram(ngram_config(), INFO, letters))
    ids = tokens_of(["abc", "d"], letters()).tobytes()
    assert commands["add_corpus"]({"corpus_id": "a", "ids": ids}) == 5
    assert commands["add_corpus"]({"corpus_id": "b", "ids": ids[:8]}) == 2
    assert commands["list_corpora"]({}) == {"a": 5, "b": 2}
    commands["remove_corpus"]({"corpus_id": "a"})
    assert commands["list_corpora"]({}) == {"b": 2}
    with pytest.raises(NotFound, match="'a' is not loaded"):
        commands["remove_corpus"]({"corpus_id": "a"})


def test_commands_without_ngram() -> None:
    for verb in ("add_corpus", "remove_corpus", "list_corpora"):
        with pytest.raises(InvalidRequest, match="--speculative-algorithm NGRAM"):
            corpus_commands(None)[verb]({"corpus_id": "a", "ids": b""})


@pytest.mark.parametrize(
    ("device", "depth", "architecture", "expected", "reason"),
    [
        ("cpu", 0, "Qwen3ForCausalLM", 15, ""),
        ("cpu", 0, "Qwen3NextForCausalLM", 15, ""),
        ("cpu", 0, "RwkvForCausalLM", 15, ""),
        ("cuda", 1, "Qwen3ForCausalLM", 0, "steps overlap"),
        ("cuda", 0, "RwkvForCausalLM", 0, "recurrent layers on a GPU"),
    ],
)
def test_where_no_draft_is_verified(
    device: str,
    depth: int,
    architecture: str,
    expected: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny = ServerConfig.from_kwargs(model_path=str(cached_tiny(architecture)))
    decoder = read_model(tiny)[0].decoder
    caplog.set_level(logging.WARNING)
    ngram = ServerConfig.from_kwargs(speculative_algorithm="NGRAM", device=device)
    assert max_drafts(ngram, depth, decoder) == expected
    assert caplog.messages == ([f"no drafts are verified: {reason}"] if reason else [])
    assert max_drafts(ServerConfig.from_kwargs(device=device), depth, decoder) == min(expected, 7)
