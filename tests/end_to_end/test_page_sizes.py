"""--page-size changes neither numbers nor hits: the same bits and the same cached tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

import radixlm
from tests.fakes.tiny_checkpoint import cached_tiny

SAMPLING = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
RNG = random.Random(1)
PROMPT = [RNG.randrange(3, 250) for _ in range(121)]
OTHERS = [[RNG.randrange(3, 250) for _ in range(count)] for count in (5, 9, 33)]


def _answers(**options: Any) -> tuple[list[list[float]], list[int]]:
    """Log-probabilities of one prompt in several surroundings, and its cached tokens in each."""
    model = options.pop("model_path", "radix-tiny")
    options = {"max_total_tokens": 4096, "cpu_threads": 1, "random_seed": 1, **options}
    asked = {"sampling_params": SAMPLING, "return_logprob": True}
    with radixlm.Engine(model_path=str(model), log_level="error", **options) as engine:
        first = engine.generate(input_ids=PROMPT, logprob_start_len=0, **asked)
        again = engine.generate(input_ids=PROMPT, **asked)
        batch = engine.generate(input_ids=[PROMPT, *OTHERS], **asked)
        left = engine.generate(input_ids=[*PROMPT[:77], *OTHERS[2]], **asked)
        facts = engine.get_server_info()
    assert facts["page_size"] == options.get("page_size", 16)
    assert facts["attention_backend"] == "cpu"
    metas = [answer["meta_info"] for answer in (first, again, batch[0], left)]
    logprobs = [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas]
    assert logprobs[0] == logprobs[1] == logprobs[2]
    prompt = [entry[0] for entry in metas[0]["input_token_logprobs"]]
    return [prompt, logprobs[0], logprobs[3]], [meta["cached_tokens"] for meta in metas]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_same_bits_and_hits_at_every_page_size(kv_cache_dtype: str) -> None:
    expected = _answers(kv_cache_dtype=kv_cache_dtype)
    assert expected[1] == [0, 120, 120, 77]
    for page_size in (1, 2, 4, 5, 24, 48):
        chunk = 16 if page_size % 2 else 2048
        got = _answers(
            kv_cache_dtype=kv_cache_dtype, page_size=page_size, chunked_prefill_size=chunk
        )
        assert got == expected, page_size


def test_small_pages_with_quantised_weights() -> None:
    """Eight-bit activations make the most of a difference in one bit."""
    expected = _answers(quantization="w8a8_int8")
    assert _answers(quantization="w8a8_int8", page_size=1, chunked_prefill_size=7) == expected


# sliding windows beside full layers; latents; and recurrent states, which are shared by whole pages
@pytest.mark.parametrize(
    ("architecture", "cached"),
    [
        ("Gemma3ForCausalLM", [0, 120, 120, 77]),
        ("DeepseekV3ForCausalLM", [0, 120, 120, 77]),
        ("Qwen3NextForCausalLM", [0, 112, 112, 0]),
    ],
)
def test_families_at_small_pages(architecture: str, cached: list[int]) -> None:
    folder = cached_tiny(architecture)
    expected = _answers(model_path=folder)
    assert expected[1] == cached
    assert _answers(model_path=folder, page_size=1) == expected


def test_one_token_is_a_hit_at_page_size_one() -> None:
    options = {"model_path": "radix-tiny", "cpu_threads": 1, "max_total_tokens": 512}
    for page_size, cached in ((1, [1, 18]), (2, [0, 18]), (16, [0, 16])):
        with radixlm.Engine(page_size=page_size, log_level="error", **options) as engine:
            engine.generate(input_ids=PROMPT[:40], sampling_params=SAMPLING)
            got = [
                engine.generate(input_ids=[*PROMPT[:shared], 7, 8], sampling_params=SAMPLING)
                for shared in (1, 18)
            ]
        assert [one["meta_info"]["cached_tokens"] for one in got] == cached


def test_without_the_prefix_cache_running_requests_share_nothing() -> None:
    """The third prompt starts when the second has ended, beside the first, which equals it."""
    options = {"model_path": "radix-tiny", "cpu_threads": 1, "max_total_tokens": 512}
    sampling = [SAMPLING | {"max_new_tokens": count} for count in (60, 1, 1)]
    prompts = [PROMPT[:15], OTHERS[0], PROMPT[:15]]
    for is_off, cached in ((False, [0, 0, 14]), (True, [0, 0, 0])):
        with radixlm.Engine(
            disable_radix_cache=is_off, max_running_requests=2, log_level="error", **options
        ) as engine:
            got = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert [one["meta_info"]["cached_tokens"] for one in got] == cached
