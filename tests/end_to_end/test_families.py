"""Every model family through a whole engine, against Hugging Face in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import radixlm
from tests.fakes.tiny_checkpoint import ARCHITECTURES, cached_tiny, reference_model

NEW = 32
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}


def _engine(folder: object, **options: object) -> radixlm.Engine:
    options = {"chunked_prefill_size": 2048, "max_total_tokens": 8192, **options}
    return radixlm.Engine(
        model_path=str(folder), cpu_threads=1, random_seed=1, log_level="error", **options
    )


def _hugging_face(folder: Path, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """The likeliest token after each, and log-probabilities of all positions."""
    with torch.no_grad():
        logits = reference_model(folder)(torch.tensor([ids])).logits[0]
    return logits.argmax(-1).tolist(), torch.log_softmax(logits.float(), -1)


# one of every mechanism; the others are slow tests
QUICK = {
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "FalconForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel"),
    *("BloomForCausalLM", "Llama4ForCausalLM", "MiMoV2FlashForCausalLM", "NanoChatForCausalLM"),
    *("LongcatFlashForCausalLM", "MambaForCausalLM", "FalconH1ForCausalLM"),
    *("Qwen3NextForCausalLM", "MiniMaxForCausalLM", "Lfm2ForCausalLM", "KimiLinearForCausalLM"),
    *("RecurrentGemmaForCausalLM", "DeepseekV4ForCausalLM", "MiniMaxM3VLForCausalLM"),
    *("HrmTextForCausalLM", "ZayaForCausalLM", "InklingForCausalLM", "RwkvForCausalLM"),
    *("Qwen4ExpForCausalLM", "MuseSparkForConditionalGeneration"),
}


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_family_equals_hugging_face(architecture: str) -> None:
    folder = cached_tiny(architecture)
    generator = torch.Generator().manual_seed(len(architecture))
    prompt = torch.randint(3, 250, (37,), generator=generator).tolist()
    others = [torch.randint(3, 250, (n,), generator=generator).tolist() for n in range(5, 20)]
    with _engine(folder) as engine:
        miss = engine.generate(
            input_ids=prompt, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
        )
        hit = engine.generate(input_ids=prompt, sampling_params=GREEDY)
        batch = engine.generate(input_ids=[prompt, *others], sampling_params=GREEDY)
    likeliest, logprobs = _hugging_face(folder, prompt + miss["output_ids"])
    want = likeliest[len(prompt) - 1 : -1]  # equal to ours, it is the greedy continuation
    assert miss["output_ids"] == want
    got_in = [entry[0] for entry in miss["meta_info"]["input_token_logprobs"]][1:]
    want_in = [float(logprobs[i, t]) for i, t in enumerate(prompt[1:])]
    got_out = [entry[0] for entry in miss["meta_info"]["output_token_logprobs"]]
    places = range(len(prompt) - 1, len(prompt) - 1 + NEW)
    want_out = [float(logprobs[i, t]) for i, t in zip(places, want, strict=True)]
    assert got_in == pytest.approx(want_in, abs=1e-4)
    assert got_out == pytest.approx(want_out, abs=1e-4)
    assert hit["meta_info"]["cached_tokens"] in (32, 36) and hit["output_ids"] == want
    assert batch[0]["output_ids"] == want
    with _engine(folder, chunked_prefill_size=16) as engine:
        chunked = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    assert chunked["output_ids"] == want
