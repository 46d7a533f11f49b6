"""Cost of structured output: the mask of one step, and the time between tokens.

    python bench/grammar.py fills [--backends llguidance xgrammar]
    python bench/grammar.py steps [--model FOLDER] [--batch 16] [--rounds 7]

``fills``: 10,000 masks along real JSON documents, with a vocabulary of 32,000 tokens that is
trained here on the sources of Python's library; processor time of the thread.
``steps``: the same batch with and without a JSON schema, in turns, in one engine. Two times of a
step, each the minimum over the rounds: by the clock, and the processor time of the engine's thread
(what a schema adds where a core is free for the masks). ``--jump``: how many steps forced tokens
save instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, pre_tokenizers, trainers

from radixlm.entrypoints.offline import Engine
from radixlm.grammar.compile import create_backend
from radixlm.grammar.spec import GrammarSpec
from radixlm.text.tokenizer import Tokenizer, load_tokenizer

VOCAB = 32_000
NUM_FILLS = 10_000
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "red", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "score": {"type": "number"},
    },
    "required": ["name", "age", "email", "tags", "address", "score"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
FREE: dict[str, Any] = {"type": "object"}


def documents() -> Iterator[tuple[dict[str, Any], str]]:
    """Endless pairs of a schema and a document that matches it."""
    number = 0
    while True:
        number += 1
        person = {
            "name": f"Ada Lovelace of number {number}",
            "age": number % 150,
            "email": "ada@engine.org",
            "tags": ["new", "red"][: number % 3],
            "address": {"street": f"{number} Analytical Street", "zip": f"{number:05}"},
            "score": number / 8,
        }
        leaf = {"value": f"leaf {number}", "children": []}
        tree = {"value": number, "children": [leaf, {"value": 2, "children": [leaf]}]}
        yield PERSON, json.dumps(person)
        yield TREE, json.dumps(tree)
        yield FREE, json.dumps(person, indent=2)


def vocabulary(folder: Path) -> Tokenizer:
    """A byte-level BPE of 32,000 tokens."""
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sources)
    trained.train_from_iterator(texts, trainer)
    trained.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return load_tokenizer(folder)


def time_fills(name: str, tokenizer: Tokenizer) -> None:
    """Print the mean, median and slowest of NUM_FILLS masks."""
    backend = create_backend(name, tokenizer, [0], VOCAB)
    assert backend is not None
    grammars: dict[str, Any] = {}
    mask = np.empty((VOCAB + 31) // 32, np.int32)
    fills_us: list[float] = []
    accepts_us: list[float] = []
    for schema, text in documents():
        key = json.dumps(schema)
        if key not in grammars:
            grammars[key] = backend.compile(GrammarSpec("json_schema", key))
            continue  # the first document warms up
        matcher = grammars[key].matcher()
        for token in tokenizer.encode(text, False):
            began = time.thread_time()
            matcher.fill_mask(mask)
            middle = time.thread_time()
            is_accepted = matcher.accept(token)
            accepts_us.append(1e6 * (time.thread_time() - middle))
            fills_us.append(1e6 * (middle - began))
            assert is_accepted and mask[token // 32] >> (token % 32) & 1
        if len(fills_us) >= NUM_FILLS:
            break
    ordered = sorted(fills_us)
    mean, median, most = statistics.mean(fills_us), ordered[len(ordered) // 2], ordered[-1]
    print(
        f"{name:11} {len(fills_us)} masks of {VOCAB} tokens, us: mean {mean:.1f}, "
        f"median {median:.1f}, 99 % {ordered[len(ordered) * 99 // 100]:.1f}, slowest {most:.0f}; "
        f"accept {statistics.mean(accepts_us):.1f}"
    )


LONG = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}


def time_steps(args: argparse.Namespace) -> None:
    """Print the time of a step with and without a schema."""
    options: dict[str, Any] = {"load_format": "dummy"} if args.dummy else {}
    if args.backend:
        options["grammar_backend"] = args.backend
    if args.jump:
        options["constrained_json_disable_any_whitespace"] = True
    if args.tokenizer:
        options["tokenizer_path"] = args.tokenizer
    with Engine(
        model_path=args.model,
        log_level="error",
        max_running_requests=args.batch,
        disable_radix_cache=True,
        disable_jump_forward=not args.jump,
        cpu_threads=args.threads,
        **options,
    ) as engine:
        plain = {"max_new_tokens": args.tokens, "ignore_eos": True, "temperature": 1.0}
        bound = plain | {"json_schema": json.dumps(LONG)}
        rounds: dict[str, list[Round]] = {"plain": [], "schema": []}
        for number in range(args.rounds + 1):
            for name, params in (("plain", plain), ("schema", bound)):
                made = one_round(engine, params, args.batch)
                if number:  # the first warms up
                    rounds[name].append(made)
    plain_steps, bound_steps = (rounds[name][0].num_steps for name in ("plain", "schema"))
    print(f"{args.model}, batch {args.batch}, {args.tokens} tokens each")
    for kind in ("wall_ms", "cpu_ms"):
        best = {name: min(getattr(r, kind) for r in made) for name, made in rounds.items()}
        ratios = [
            getattr(b, kind) / getattr(a, kind)
            for a, b in zip(rounds["plain"], rounds["schema"], strict=True)
        ]
        print(
            f"  {kind.removesuffix('_ms'):4} {best['plain']:.3f} ms a step, with a JSON schema "
            f"{best['schema']:.3f} ms: {100 * (best['schema'] / best['plain'] - 1):+.1f} % (best), "
            f"{100 * (statistics.median(ratios) - 1):+.1f} % (median of {len(ratios)} rounds)"
        )
    print(f"  {plain_steps} steps, with the schema {bound_steps}")


@dataclass(frozen=True)
class Round:
    """One batch: milliseconds a step, and the number of steps."""

    wall_ms: float
    cpu_ms: float
    num_steps: int


def one_round(engine: Engine, params: dict[str, Any], batch: int) -> Round:
    """Run `batch` requests to their end."""
    prompts = [f"Number {i}:" for i in range(batch)]
    (thread,) = (t for t in threading.enumerate() if t.name == "engine")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    began_steps = engine.get_server_info()["internal_states"][0]["num_steps"]
    began, worked = time.perf_counter(), time.clock_gettime(clock)
    answers = engine.generate(prompts, params)
    took, worked = time.perf_counter() - began, time.clock_gettime(clock) - worked
    steps = engine.get_server_info()["internal_states"][0]["num_steps"] - began_steps
    assert all(len(a["output_ids"]) == params["max_new_tokens"] for a in answers)
    return Round(1000 * took / steps, 1000 * worked / steps, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fills", "steps"))
    parser.add_argument("--backends", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--backend")
    parser.add_argument("--model", default="radix-tiny")
    parser.add_argument("--tokenizer", help="folder of another tokenizer")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--jump", action="store_true", help="with jump-forward, compact JSON")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.what == "steps":
        time_steps(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = vocabulary(Path(folder))
        for name in args.backends:
            time_fills(name, tokenizer)


if __name__ == "__main__":
    main()
