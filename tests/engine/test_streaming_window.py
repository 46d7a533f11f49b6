"""Streaming windows on real engines: each token is the one that a plain request for the visible
tokens gets, with every kind of layer and cache, drafts, retraction, and company."""

from __future__ import annotations

from typing import Any

import pytest

import radixlm
from radixlm.engine.model_info import ZOO
from radixlm.wire.requests import StreamingWindow
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.scheduler.test_streaming_window import visible

WINDOW = StreamingWindow(24, 2)
FIELDS = {"streaming_window": 24, "streaming_sinks": 2}
GREEDY = {"temperature": 0.0, "max_new_tokens": 50, "ignore_eos": True}
QWEN3 = "Qwen3ForCausalLM"
TIGHT = {"max_total_tokens": 80, "page_size": 4, "schedule_conservativeness": 0.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    (QWEN3, {"kv_cache_dtype": "int8", "chunked_prefill_size": 8}),
    (QWEN3, {**TIGHT, "speculative_algorithm": "NGRAM"}),
]
ADAPTER = str(ZOO / "radix-tiny-lora-upper")
SLOW: list[tuple[str, dict[str, Any]]] = [
    (QWEN3, {"kv_cache_dtype": "int4", "attention_backend": "torch_native"}),
    (QWEN3, {"disable_radix_cache": True, "page_size": 1}),
    ("Gemma3ForCausalLM", {"chunked_prefill_size": 8}),
    ("DeepseekV3ForCausalLM", {"page_size": 4}),
    ("Qwen3NextForCausalLM", {"chunked_prefill_size": 16}),
    ("radix-tiny", {"lora_paths": [f"upper={ADAPTER}"]}),
    ("radix-tiny", {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}),
]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [*CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_each_token_is_that_of_the_visible_tokens(
    architecture: str, options: dict[str, Any]
) -> None:
    is_tiny = architecture != "radix-tiny"
    folder = cached_tiny(architecture) if is_tiny else architecture
    if not is_tiny and not (ZOO / "radix-tiny-eagle3" / "config.json").is_file():
        pytest.skip("the bundled model's drafts and adapters are not built")
    adapter = {"lora_path": "upper"} if "lora_paths" in options else {}
    fields = FIELDS | adapter
    settings = {"max_total_tokens": 512, "cpu_threads": 1, "log_level": "error", **options}
    prompts = [[5 + i * 7 % 90 for i in range(count)] for count in (3, 70, 26)]
    with radixlm.Engine(model_path=str(folder), random_seed=1, **settings) as engine:
        answers = engine.generate(input_ids=prompts, sampling_params=GREEDY, **fields)
        drawn = GREEDY | {"temperature": 1.0, "sampling_seed": 3}
        samples = engine.generate(
            input_ids=[prompts[0]], sampling_params=[drawn | {"n": 2}], **fields
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            stream = [*prompt, *answer["output_ids"]]
            assert len(stream) == len(prompt) + 50
            assert answer["meta_info"]["prompt_tokens"] == len(prompt)
            ends = range(len(prompt), len(stream), 7)
            wanted = engine.generate(
                input_ids=[visible(stream[:end], WINDOW) for end in ends],
                sampling_params=GREEDY | {"max_new_tokens": 1},
                **adapter,
            )
            assert [one["output_ids"][0] for one in wanted] == [stream[end] for end in ends]
        first, second = (one["output_ids"] for one in samples)
        alone = engine.generate(input_ids=prompts[0], sampling_params=drawn, **fields)
        assert alone["output_ids"] == first != second
