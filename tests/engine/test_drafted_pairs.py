"""Drawn requests in a whole engine: any features of a request together with drafts of any quality
give the answer that they give without."""

from __future__ import annotations

import random
from typing import Any

import pytest

import radixlm
from tests.engine.drafted_engine import drafted_engine, follower
from tests.engine.test_drafted_engine import facts
from tests.fakes.drafts import ForcedDrafts

WORDS = "the a of one two capital number small house cat sat on and is are was".split()
SCHEMA = (
    '{"type": "object", "properties": {"name": {"enum": ["Ada", "Alan"]}, "n": {"type": "integer"},'
    ' "text": {"type": "string"}}, "required": ["name", "n"], "additionalProperties": false}'
)
CHOICES: dict[str, list[dict[str, Any]]] = {
    "draw": [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 1.0},
        {"temperature": 2.0},
    ],
    "filter": [{}, {}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}],
    "penalty": [
        {},
        {},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.1, "repetition_penalty": 1.4},
    ],
    "bias": [{}, {}, {"logit_bias": {"11": 5.0, "40": -80.0}}],
    "tokens": [
        {},
        {},
        {"allowed_token_ids": list(range(0, 500, 3))},
        {"bad_words": ["the", "of one"]},
    ],
    "stop": [
        {},
        {"stop": ["e t", "."]},
        {"stop_regex": "[0-9]{2}"},
        {"stop_token_ids": list(range(60, 90))},
        {"ignore_eos": True},
    ],
    "grammar": [
        {},
        {},
        {},
        {"json_schema": SCHEMA},
        {"regex": "(yes|no), [a-z ]{3,30}(, certainly)?"},
        {"ebnf": 'root ::= "= " [0-9]+ (" or " [0-9]+)?'},
    ],
    "length": [{"min_new_tokens": 5}, {}, {}, {"n": 2}],
}


def draw(rng: random.Random) -> dict[str, Any]:
    """A request: a prompt, sampling parameters, and what is asked besides."""
    sampling: dict[str, Any] = {"sampling_seed": rng.randrange(1 << 40)}
    for options in CHOICES.values():
        sampling |= rng.choice(options)
    sampling["max_new_tokens"] = rng.choice([5, 6, 9, 20, 40])
    if "json_schema" in sampling and rng.random() < 0.5:
        sampling["max_new_tokens"] = 60
    is_free = not {"json_schema", "regex", "ebnf"} & set(sampling)  # else nothing may be left
    processor = "no_repeat_ngram" if is_free and rng.random() < 0.4 else None
    if processor is not None:
        sampling["custom_params"] = {"ngram_size": rng.choice([1, 2, 3])}
    return {
        "prompt": " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 20))),
        "sampling": sampling,
        "processor": processor,
        "logprobs": rng.random() < 0.3,
    }


def ask(engine: radixlm.Engine, requests: list[dict[str, Any]]) -> list[Any]:
    """The answers; requests with several samples are asked alone, as ``n`` is of a call."""
    # loads the grammar library, whatever else runs on the machine
    engine.generate("x", {"json_schema": SCHEMA, "max_new_tokens": 1})
    answers: list[Any] = []
    for is_several in (False, True):
        chosen = [r for r in requests if ("n" in r["sampling"]) == is_several]
        calls = [[r] for r in chosen] if is_several else [chosen]
        for call in calls:
            answers += engine.generate(
                [r["prompt"] for r in call],
                [r["sampling"] for r in call],
                return_logprob=[r["logprobs"] for r in call],
                top_logprobs_num=[2] * len(call),
                custom_logit_processor=[r["processor"] for r in call],
            )
    return answers


def compare(
    requests: list[dict[str, Any]], kind: str, options: dict[str, Any], **shape: Any
) -> ForcedDrafts:
    """Ask an engine with oracle drafts of this kind, and one without drafts."""
    options = {"model_path": "radix-tiny", **options}
    with drafted_engine(None, **options) as engine:
        assert engine.tokenizer is not None
        encode = engine.tokenizer.encode
        plain = ask(engine, requests)
    prompts = {request["prompt"]: encode(request["prompt"]) for request in requests}
    known = [[*ids, *one["output_ids"]] for ids in prompts.values() for one in plain]
    drafts = ForcedDrafts(follower(known), kind, varies=True, **shape)
    with drafted_engine(drafts, **options) as engine:
        wide = ask(engine, requests)
        assert engine.get_server_info()["internal_states"][0]["num_breaches"] == 0
    assert [facts(one) for one in wide] == [facts(one) for one in plain]
    return drafts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixed", {"max_running_requests": 16}),
        ("mixed", {"chunked_prefill_size": 24, "max_running_requests": 6, "page_size": 16}),
        ("oracle", {"max_total_tokens": 700, "page_size": 4, "disable_jump_forward": True}),
        ("random", {"grammar_backend": "xgrammar"}),
    ],
    ids=str,
)
def test_drawn_requests(kind: str, options: dict[str, Any]) -> None:
    if options.get("grammar_backend") == "xgrammar":
        pytest.importorskip("xgrammar")
    rng = random.Random(repr(options))
    drafts = compare([draw(rng) for _ in range(60)], kind, options, most=6)
    rounds = [one for each in drafts.rounds.values() for one in each]
    assert len(rounds) > 50 and sum(accepted for _, accepted in rounds) > 20
