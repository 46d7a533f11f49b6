"""allowed_token_ids, bad_words and best_of, compared with the plain answers of the same engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import radixlm
from radixlm.base.errors import InvalidRequest
from radixlm.engine.features.token_rules import TokenRules
from radixlm.scheduler.hooks import Feature, Hooks
from radixlm.step.masks import Masks
from radixlm.step.plan import Item
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.tiny_checkpoint import cached_tiny

PLAIN = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}

ITEM = Item("a", 0, 0, 1, None, True)


@pytest.fixture(scope="module")
def engine() -> Iterator[radixlm.Engine]:
    folder = str(cached_tiny("Qwen3ForCausalLM"))
    with radixlm.Engine(
        model_path=folder, cpu_threads=1, log_level="error", max_total_tokens=4096
    ) as made:
        yield made


def generate(engine: radixlm.Engine, **more: object) -> list[int]:
    ids: list[int] = engine.generate("Once upon", {**PLAIN, **more})["output_ids"]
    return ids


def test_only_allowed_tokens_are_sampled(engine: radixlm.Engine) -> None:
    allowed = [3, 32, 64, 77, 200]
    got = generate(engine, allowed_token_ids=allowed)
    assert set(got) <= set(allowed) and len(set(got)) > 2
    assert len(got) == 24
    biased = {token: -1e9 for token in range(engine.info.decoder.vocab) if token not in allowed}
    assert got == generate(engine, logit_bias=biased)


def test_bad_words_never_come(engine: radixlm.Engine) -> None:
    """The word's last token is drawn from the others, and nothing before it changes."""
    plain = generate(engine)
    assert engine.tokenizer is not None
    words = []
    for start in (2, 9):
        text = engine.tokenizer.decode(plain[start : start + 2])
        if engine.tokenizer.encode(text, False) == plain[start : start + 2]:
            words.append(text)
    assert words
    got = generate(engine, bad_words=words)
    assert got != plain and got[:3] == plain[:3]
    for word in words:
        ids = engine.tokenizer.encode(word, False)
        assert not any(got[i : i + len(ids)] == ids for i in range(len(got)))


def test_a_grammar_and_rules_hold_together(engine: radixlm.Engine) -> None:
    """Where the rules leave nothing of what the grammar allows, the grammar goes on."""
    assert engine.tokenizer is not None
    digits = [engine.tokenizer.encode(d, False)[-1] for d in "123456789"]
    got = engine.generate(
        "x", {"regex": "[0-9]{6}", "allowed_token_ids": digits[:2], "temperature": 1.5}
    )
    assert len(got["text"]) == 6 and set(got["text"]) <= {"1", "2"}
    assert got["meta_info"]["finish_reason"]["type"] == "stop"
    with pytest.raises(InvalidRequest, match="bad_words forbids all"):
        engine.generate("x", {"allowed_token_ids": digits[:1], "bad_words": ["1"]})


@pytest.mark.parametrize("seed", range(3))
def test_masks_equal_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    vocab = 70
    for _ in range(40):
        allowed = tuple(rng.sample(range(vocab), rng.randint(0, 40)))
        words = tuple(tuple(rng.choices(range(6), k=rng.randint(1, 3))) for _ in range(4))
        output = rng.choices(range(6), k=rng.randint(0, 6))
        sampling = SamplingParams(allowed_token_ids=allowed)
        wire = SimpleNamespace(sampling=sampling, bad_words=words)
        request = SimpleNamespace(rid="a", wire=wire, output_ids=np.array(output, np.int32))
        wanted = {
            token
            for token in allowed or range(vocab)
            if not any(tuple([*output, token][-len(word) :]) == word for word in words)
        }
        rules = TokenRules(vocab)
        try:
            rules.arrive(request)  # type: ignore[arg-type]
        except InvalidRequest:
            assert not wanted
            continue
        ((_, mask),) = rules.masks([ITEM]).items()
        bits = np.unpackbits(mask.view("u1"), bitorder="little")[:vocab]
        assert set(np.flatnonzero(bits).tolist()) == wanted
        rules.release(request)  # type: ignore[arg-type]
        assert rules.masks([ITEM]) == {}


def test_masks_that_leave_nothing_together() -> None:
    class Fixed(Feature):
        def __init__(self, mask: int) -> None:
            self.mask = np.array([mask], np.int32)

        def masks(self, items: object) -> Masks:
            return Masks({0: self.mask})

    def of(*words: int) -> int:
        return int(Hooks([Fixed(word) for word in words]).masks([])[0][0])

    assert of(6, 3) == 2
    assert of(4, 3) == 4


def test_best_of_returns_the_likeliest(engine: radixlm.Engine) -> None:
    params = {**PLAIN, "ignore_eos": False, "max_new_tokens": 6}
    every = engine.generate("Once", {**params, "n": 5}, return_logprob=True)
    means = [
        sum(c[0] for c in chosen) / len(chosen)
        for chosen in (one["meta_info"]["output_token_logprobs"] for one in every)
    ]
    order = sorted(range(5), key=lambda i: -means[i])
    one = engine.generate("Once", {**params, "best_of": 5})
    assert one["output_ids"] == every[order[0]]["output_ids"]
    assert "output_token_logprobs" not in one["meta_info"]
    two = engine.generate("Once", {**params, "best_of": 5, "n": 2})
    assert [t["output_ids"] for t in two] == [every[i]["output_ids"] for i in order[:2]]
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 0}):
        with pytest.raises(InvalidRequest, match="best_of"):
            engine.generate("Once", {**params, **wrong})
    with pytest.raises(InvalidRequest, match="best_of"):
        list(engine.generate("Once", {**params, "best_of": 2}, stream=True))
