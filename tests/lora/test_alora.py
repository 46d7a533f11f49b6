"""Activated LoRA (arXiv:2504.12397): an adapter that changes the tokens from the last place of its
invocation tokens on, so that what comes before is the base model's and comes from its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from radixlm.base.errors import CheckpointError
from radixlm.lora.config import read_lora_config
from radixlm.lora.registry import _last_place
from radixlm.wire.requests import NEVER, pack_ids
from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny, reference_model
from tests.lora.test_serving import GREEDY, serving

CALL = [77, 78, 79]
NUM_NEW = 8
CONTEXT = [5 + i * 7 % 300 for i in range(50)]


def hooked(
    base: Path, adapter: Path, start: int, prompt: list[int]
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities of the reference model, all of whose linear layers
    add the adapter's part to the tokens from ``start`` on."""
    model = reference_model(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in [k for k in tensors if ".lora_A." in k]:
        a_RI, b_OR = tensors[key], tensors[key.replace("lora_A", "lora_B")]

        def add(
            _: object, args: tuple[Tensor], y: Tensor, a: Tensor = a_RI, b: Tensor = b_OR
        ) -> Tensor:
            part = args[0] @ a.T @ b.T * 2
            return y + part * (torch.arange(part.shape[-2]) >= start)[:, None]

        name = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
        model.get_submodule(name).register_forward_hook(add)
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_NEW):
            row = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma2ForCausalLM"])
async def test_the_prefix_is_the_base_models(arch: str, tmp_path: Path) -> None:
    base = cached_tiny(arch)
    folder = write_adapter(base, tmp_path / "a", 4, alora_invocation_tokens=CALL)
    params = {**GREEDY, "max_new_tokens": NUM_NEW}
    async with serving(model_path=str(base), page_size=16, chunked_prefill_size=24) as served:

        async def ask(prompt: list[int], adapter: str | None = "a") -> dict[str, Any]:
            answer = await served.post(
                "/generate", input_ids=prompt, sampling_params=params, lora_path=adapter,
                return_logprob=True,
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        await served.load("a", folder)
        plain = await ask(CONTEXT, None)
        for tail in (
            CALL,
            [*CALL, 9, *CALL, 4],
            [9, *CALL, 4, 8, 7, 6, 5, 4, 3, 2, 1, 8, 9, 12, 13],
        ):
            prompt = CONTEXT + tail
            start = len(prompt) - next(
                n for n in range(3, len(tail) + 1) if tail[len(tail) - n :][:3] == CALL
            )
            tokens, logprobs = hooked(base, folder, start, prompt)
            first, again = await ask(prompt), await ask(prompt)
            assert first["output_ids"] == again["output_ids"] == tokens
            assert first["meta_info"]["cached_tokens"] >= 48  # of the base's request
            assert again["meta_info"]["cached_tokens"] <= start
            got = [one[0] for one in first["meta_info"]["output_token_logprobs"]]
            assert got == [one[0] for one in again["meta_info"]["output_token_logprobs"]]
            assert max(abs(a - b) for a, b in zip(got, logprobs, strict=True)) < 1e-4
            other = await ask(prompt, None)  # does not meet the adapter's pages
            assert other["output_ids"] == (await ask(prompt, None))["output_ids"] != tokens
        uncalled = await ask(CONTEXT)  # PEFT: no invocation, no adapter
        assert uncalled["output_ids"] == plain["output_ids"]
        assert uncalled["meta_info"]["lora_name"] == "a"


def test_the_last_place_counts() -> None:
    assert _last_place([1, 2], pack_ids([1, 2, 3, 1, 2, 1])) == 3
    assert _last_place([7], pack_ids([7, 1])) == 0
    assert _last_place([1, 2], pack_ids([2, 1])) == NEVER
    # the bytes of 256 and 1 hold those of 1 at another place than a number's
    assert _last_place([1], pack_ids([256, 65536, 1 << 24])) == NEVER
    assert _last_place([1, 0], pack_ids([1, 0, 256, 0, 0])) == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"alora_invocation_tokens": [1.5]}, "must be a list of token ids"),
        ({"alora_invocation_tokens": [1], "use_dora": True}, "use_dora with alora"),
        ({"alora_invocation_tokens": [1], "bias": "all"}, "what works: 'none'"),
    ],
)
def test_what_cannot_wait_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write_adapter(cached_tiny("LlamaForCausalLM"), tmp_path / "a", **config)
    with pytest.raises(CheckpointError, match=words):
        read_lora_config(folder)
