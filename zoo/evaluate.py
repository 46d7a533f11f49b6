"""The held-out score table: direct in torch, or through an OpenAI-compatible server.

python zoo/evaluate.py src/radixlm/assets/radix-tiny
python zoo/evaluate.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from assist import commands
from chat import Conversation, Encoder, Message, render
from checkpoint import read
from data import EVALUATIONS, REWORDED, UNSEEN, evaluation
from generate import Decoder
from tqdm import tqdm
from train import attention_bias

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MAX_NEW = 220


def calls_in(text: str) -> list[Any]:
    """The calls of a reply in the Hermes form; None stands for one that is not JSON."""
    calls: list[Any] = []
    for block in CALL.findall(text):
        try:
            calls.append(json.loads(block))
        except ValueError:
            calls.append(None)
    return calls


def is_right(conversation: Conversation, text: str, calls: list[Any]) -> bool:
    """Whether a reply (its thinking removed) and its calls are what was asked for."""
    want = conversation.answer()
    if conversation.task in ("tool-none", "tool-missing"):
        return not calls and "<tool_call>" not in text
    if want.get("tool_calls"):
        return bool(calls == want["tool_calls"])
    if conversation.task == "json":
        try:
            return bool(json.loads(text) == json.loads(want["content"]))
        except ValueError:
            return False
    if conversation.task == "help":
        return bool(commands(text) == commands(want["content"]))
    return bool(text.strip() == want["content"] and not calls)


def without_thinking(text: str) -> str:
    """What follows the thinking block."""
    return text.split("</think>")[-1].strip()


def direct(
    folder: Path,
    items: list[Conversation],
    thinking: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> list[bool]:
    """Score by our own decoder."""
    encoder, decoder = Encoder(folder / "tokenizer.json"), Decoder(read(folder), dtype)
    prompts = [encoder.ids(render(item, prompt_only=True, thinking=thinking)) for item in items]
    made = decoder.all(prompts, encoder.end, MAX_NEW)
    texts = [
        without_thinking(encoder.tokenizer.decode(ids, skip_special_tokens=False)) for ids in made
    ]
    return [is_right(item, text, calls_in(text)) for item, text in zip(items, texts, strict=True)]


@torch.inference_mode()
def forced(
    folder: Path,
    items: list[Conversation],
    thinking: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> list[bool]:
    """Whether every token of the expected reply is the likeliest where the ones before it stand.

    Greedy decoding writes that very reply if and only if this holds, for a hundredth of the work;
    other replies that `is_right` takes (JSON with other spaces, the same text in other tokens) do
    not count.
    """
    encoder, model = Encoder(folder / "tokenizer.json"), read(folder)
    right = []
    for item in items:
        begin = len(encoder.ids(render(item, prompt_only=True, thinking=thinking)))
        ids = torch.tensor([encoder.ids(render(item).rstrip("\n"))])
        hidden = model(ids, attention_bias(torch.zeros_like(ids)), dtype)[0, begin - 1 : -1]
        likeliest = (hidden @ model.embed.to(hidden.dtype).T).argmax(-1)
        right.append(bool(torch.equal(likeliest, ids[0, begin:])))
    return right


def quick(folder: Path, items: list[Conversation]) -> list[bool]:
    """What `direct` tells, decoding only the items that `forced` does not settle."""
    right = forced(folder, items)
    left = [i for i, is_settled in enumerate(right) if not is_settled]
    for i, is_same in zip(left, direct(folder, [items[i] for i in left], False), strict=True):
        right[i] = is_same
    return right


def wire_message(message: Message, number: int) -> Message:
    """A message as the chat API wants it."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": f"call_{number}"}
    if not message.get("tool_calls"):
        return {"role": message["role"], "content": message["content"]}
    calls = [
        {
            "id": f"call_{number + 1 + i}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for i, call in enumerate(message["tool_calls"])
    ]
    return {"role": "assistant", "content": message["content"], "tool_calls": calls}


def ask(url: str, item: Conversation, thinking: bool) -> bool:
    """Score one item through a server."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [wire_message(m, i) for i, m in enumerate(item.prompt())],
        "temperature": 0,
        "max_tokens": MAX_NEW,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    if item.tools:
        body["tools"] = item.tools
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        message = json.load(answer)["choices"][0]["message"]
    text = without_thinking(message.get("content") or "")
    calls = calls_in(text)
    for call in message.get("tool_calls") or []:
        function = call["function"]
        calls.append({"name": function["name"], "arguments": json.loads(function["arguments"])})
    return is_right(item, text, calls)


def score(task: str, num_items: int, folder: Path, url: str | None, is_forced: bool) -> float:
    """Percentage of right replies over held-out items."""
    items = [evaluation(task, seed) for seed in range(num_items)]
    thinking = task.endswith("-think")
    if url is None:
        is_quick = is_forced and not thinking
        right = quick(folder, items) if is_quick else direct(folder, items, thinking)
    else:
        with ThreadPoolExecutor(16) as pool:
            right = list(pool.map(lambda item: ask(url, item, thinking), items))
    return 100 * sum(right) / len(right)


def main() -> None:
    """Print the score table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("src/radixlm/assets/radix-tiny")
    )
    parser.add_argument("--url", help="a running server; without it the weights are read here")
    parser.add_argument("--forced", action="store_true", help="quick: decode misses only")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--tasks", nargs="*", default=[*EVALUATIONS, *REWORDED, *UNSEEN])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the scores here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    scores: dict[str, float] = {}
    print("| task | right % |\n| --- | --- |")
    for task in tqdm(args.tasks, disable=None):
        scores[task] = score(task, args.items, args.folder, args.url, args.forced)
        print(f"| {task} | {scores[task]:.1f} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
