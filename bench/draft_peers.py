"""Answers of the bundled model with its drafts, by this server and by llama-server, in turn.

    PYTHONPATH=src python bench/draft_peers.py --llama-server PATH --gguf FOLDER [--rounds 2]

FOLDER has tiny.gguf, draft.gguf and eagle3.gguf, made with convert_hf_to_gguf.py --outtype bf16
of radix-tiny, radix-tiny-draft and radix-tiny-eagle3 (--target-model-dir radix-tiny). Greedy
answers to prompts of `radixlm eval bundled`, one after another, as token ids through
/v1/completions: tokens a second between the first and the last token of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peers.drive import Running, Stream
from peers.engines import MODEL_NAME, Engine
from peers.workload import Timed
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL, ITEMS = (ROOT / "src/radixlm/assets" / one for one in ("radix-tiny", "evals/bundled.jsonl"))
MAX_TOKENS, TIMEOUT_S = 160, 60.0
OUR_DRAFTS = {
    "plain": (),
    "draft model": ("--speculative-algorithm", "STANDALONE"),
    "EAGLE-3": ("--speculative-algorithm", "EAGLE3"),
    "n-grams": ("--speculative-algorithm", "NGRAM"),
}
# --spec-type of llama-server, and the file of the draft
THEIR_DRAFTS = {
    "plain": ("none", ""),
    "draft model": ("draft-simple", "draft.gguf"),
    "EAGLE-3": ("draft-eagle3", "eagle3.gguf"),
    "n-grams": ("ngram-simple", ""),
}


def engines(server: Path, folder: Path, num_threads: int) -> list[Engine]:
    """Each server with each kind of drafts, those of one kind side by side."""
    found, threads = [], str(num_threads)
    for kind, flags in OUR_DRAFTS.items():
        command = (sys.executable, "-m", "radixlm", "serve", "--port", "{port}", "--cpu-threads",
                   threads, "--log-level", "error", "--served-model-name", MODEL_NAME)  # fmt: skip
        found.append(Engine(f"radixlm, {kind}", (*command, *flags)))
        name, draft = THEIR_DRAFTS[kind]
        theirs: tuple[str, ...] = (
            str(server), "-m", str(folder / "tiny.gguf"), "-c", "4096", "-np", "1", "-t", threads,
            "-tb", threads, "--port", "{port}", "--no-ui", "--spec-type", name,
        )  # fmt: skip
        theirs += ("-md", str(folder / draft)) if draft else ()
        found.append(Engine(f"llama.cpp, {kind}", theirs))
    return found


class Answers(Running):
    """A running engine that answers prompts to their end."""

    async def generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> Timed:
        """The first request, in ids that the model has."""
        known = [[one % 2000 for one in ids] for ids in prompts]
        return await super().generate(known, num_output)

    async def speed(self, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
        """(tokens a second behind the first of each answer, tokens)."""
        seconds, num_tokens = 0.0, 0
        for ids in prompts:
            body = {"model": MODEL_NAME, "prompt": ids, "max_tokens": MAX_TOKENS, "stream": True,
                    "temperature": 0.0, "stream_options": {"include_usage": True}}  # fmt: skip
            stream = Stream()
            await self._client.ask("POST", "/v1/completions", body, stream.event)
            seconds += stream.last_s - stream.first_s
            num_tokens += stream.num_tokens
        return (num_tokens - len(prompts)) / seconds, num_tokens


def read_prompts(count: int) -> list[list[int]]:
    """The items with the longest answers, as the model's chat template renders them."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    items = [json.loads(line) for line in ITEMS.read_text(encoding="utf-8").splitlines()]
    items.sort(key=lambda item: -len(str(item.get("answer", ""))))
    texts = (
        tokenizer.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True)
        for item in items[:count]
    )
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


async def measure(args: argparse.Namespace) -> None:
    """Print each engine's speeds and their median."""
    prompts, speeds = read_prompts(args.prompts), dict[str, list[float]]()
    found = engines(args.llama_server, args.gguf, args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds):
            for engine in found if number % 2 == 0 else reversed(found):
                log = Path(scratch, "log")
                async with Answers(engine, args.threads, log, TIMEOUT_S) as running:
                    await running.speed(prompts[:3])
                    speed, num_tokens = await running.speed(prompts)
                speeds.setdefault(engine.name, []).append(speed)
                print(f"{engine.name:22} {speed:7.0f} tok/s, {num_tokens} tokens", flush=True)
    for name, values in speeds.items():
        print(f"{name:22} median {statistics.median(values):7.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    for name, default in (("--prompts", 40), ("--rounds", 2), ("--threads", 2)):
        parser.add_argument(name, type=int, default=default)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
