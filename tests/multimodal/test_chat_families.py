"""Each family with a vision encoder through /v1/chat/completions with images as data URIs, against
Hugging Face's generate of the same prompt: one image, two, and a second turn from the prefix
cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

# transformers 5.24: Llama 4 reads a field that its decoder's output lacks
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None

from tests.multimodal.app_server import PARTS, PLACE, TEXTS, Served, make_image, part, served, user
from tests.multimodal.tiny import FAMILIES as FIRST
from tests.multimodal.tiny import Tiny, save
from tests.multimodal.tiny_more import MORE, NEEDS
from tests.multimodal.tiny_newer import NEWER, NEWER_NEEDS
from tests.multimodal.tiny_vision import ONE_IMAGE, PUBLISHED

FAMILIES = {**FIRST, **MORE, **NEWER}
QUICK = (
    *("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"),
    *("aya_vision", "idefics3", "janus", "deepseek_vl", "gemma3", "paligemma", "glm4v", "ovis2"),
    *("paddleocr_vl", "llama4", "mistral3"),
)
# models with bidirectional prompts or text-dependent images: only whole prompts are shared
WHOLE = ("paligemma", "instructblip")
NUM_NEW = 6
IMAGES = (make_image(40, 30), make_image(30, 64), make_image(56, 56))


class Oracle:
    """Hugging Face's model and processor on hand-written prompts."""

    def __init__(self, tiny: Tiny, model: Any) -> None:
        self.tiny, self.model = tiny, model
        self.tokenizer = tiny.processor.tokenizer

    def answer(self, text: str, chosen: list[int]) -> tuple[list[int], list[int], float]:
        """(prompt ids, greedy tokens, log-probability of the first)."""
        given = self.tiny.processor(
            text=[text.replace(PLACE, self.tiny.placeholder)],
            images=[IMAGES[i] for i in chosen],
            return_tensors="pt",
            add_special_tokens=False,
        )
        given = {
            k: v.float() if hasattr(v, "float") and v.is_floating_point() else v
            for k, v in given.items()
        }
        prompt = given["input_ids"]
        with torch.no_grad():
            made = self.model.generate(
                **given, max_new_tokens=NUM_NEW, do_sample=False, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        first = made.scores[0][0].log_softmax(-1).max().item()
        return prompt[0].tolist(), made.sequences[0, prompt.shape[1] :].tolist(), first

    def num_placeholders(self, ids: list[int], text: str) -> int:
        """Placeholder tokens of images in the prompt."""
        plain = self.tokenizer(text.replace(PLACE, ""), add_special_tokens=False)["input_ids"]
        return len(ids) - len(plain)


async def ask(server: Served, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    """(choice, usage)."""
    answer = await server.chat(
        messages, max_tokens=NUM_NEW, logprobs=True, return_token_ids=True,
        return_prompt_token_ids=True,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    made = answer.json()
    return made["choices"][0], made["usage"]


async def streamed(server: Served, messages: list[dict[str, Any]]) -> str:
    answer = await server.chat(messages, max_tokens=NUM_NEW, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"] for line in lines for choice in orjson.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def converse(server: Served, oracle: Oracle, shares: bool, has_two: bool) -> None:
    one = user(part(IMAGES[0]), "look and tell")
    first_text = f"<user>{PLACE}look and tell\n<assistant>"
    said = await compare(server, oracle, [one], first_text, [0])
    two = user("this ", part(IMAGES[1]), " and ", part(IMAGES[2]), " now")
    if has_two:
        text = f"<user>this {PLACE} and {PLACE} now\n<assistant>"
        await compare(server, oracle, [two], text, [1, 2])
    else:
        refused = await server.chat([two], max_tokens=NUM_NEW)
        assert refused.status_code == 400 and "one image" in refused.text
    answer = {"role": "assistant", "content": said["message"]["content"]}
    again = [one, answer, user("and what else is to be seen there?")]
    text = f"{first_text}{answer['content']}\n<user>and what else is to be seen there?\n<assistant>"
    cached = await compare(server, oracle, again, text, [0])
    if shares:
        num_placeholders = oracle.num_placeholders(oracle.answer(text, [0])[0], text)
        assert cached["cached"] > num_placeholders > 0
    assert await streamed(server, [one]) == answer["content"]


async def compare(
    server: Served, oracle: Oracle, messages: list[dict[str, Any]], text: str, chosen: list[int]
) -> dict[str, Any]:
    """Compare prompt, tokens and the first log-probability with Hugging Face; returns the
    choice."""
    prompt, want, first = oracle.answer(text, chosen)
    got, usage = await ask(server, messages)
    assert got["prompt_token_ids"] == prompt
    assert got["token_ids"] == want
    assert got["logprobs"]["content"][0]["logprob"] == pytest.approx(first, abs=1e-4)
    assert usage["prompt_tokens"] == len(prompt)
    return {**got, "cached": usage["prompt_tokens_details"]["cached_tokens"]}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs
def test_a_conversation_with_images(name: str, tmp_path: Path) -> None:
    if name in (needs := {**NEEDS, **NEWER_NEEDS}):
        pytest.importorskip(needs[name])
    tiny = FAMILIES[name]()
    oracle = Oracle(tiny, save(tiny, tmp_path))
    if name in PUBLISHED:
        PUBLISHED[name](tmp_path)
    is_single_token = len(oracle.tokenizer.tokenize(tiny.placeholder)) < 2
    template = TEXTS if is_single_token else PARTS.replace(PLACE, tiny.placeholder)

    async def run() -> None:
        async with served(tmp_path, template) as server:
            await converse(server, oracle, name not in WHOLE, name not in ONE_IMAGE)

    asyncio.run(run())
