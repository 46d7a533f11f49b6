"""Requests as lengths, times and shared blocks: drawn, or read from a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from radixlm.base.errors import ConfigError
from radixlm.base.record import Record

BLOCK = (
    512  # tokens of a block whose id says its content and all before it, as in Mooncake's traces
)


class Arrival(Record):
    """A request. Prompts with the same leading ``blocks`` have the same leading tokens."""

    at_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...]

    def ids(self) -> NDArray[np.int32]:
        """Token ids: each block is filled with its number."""
        ids = np.repeat(np.array(self.blocks, np.int32) + 1, BLOCK)[: self.prompt]
        return ids.astype(np.int32)


def read(path: Path, most: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """Mooncake's format: a line of JSON each with timestamp (ms), input_length, output_length and
    hash_ids. ``speed`` 2 sends it twice as fast."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if most is not None and len(found) >= most:
                break
            try:
                row = json.loads(line)
                prompt, output = int(row["input_length"]), int(row["output_length"])
                at_s, blocks = float(row["timestamp"]) / 1e3 / speed, tuple(row["hash_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: {error!r}: no line of a trace") from None
            if len(blocks) * BLOCK < prompt or prompt < 1:
                raise ConfigError(f"{path}:{number}: {len(blocks)} blocks for {prompt} tokens")
            found.append(Arrival(at_s, prompt, max(output, 1), blocks))
    return sorted(found, key=lambda arrival: arrival.at_s)


class Mix(Record):
    """Lengths that requests are drawn from: lognormal with these means, or exactly these (``cv``
    0). A share ``shared`` of prompts begins with one of ``prefixes`` system prompts of
    ``prefix`` tokens; a share ``turns`` goes on with an earlier conversation."""

    prompt: float = 2048.0
    output: float = 256.0
    cv: float = 0.8
    shared: float = 0.0
    prefixes: int = 16
    prefix: int = 1024
    turns: float = 0.0
    longest: int = 32768


MIXES = {
    "chat": Mix(1200, 300, 1.0, shared=0.6, turns=0.5),
    "code": Mix(2500, 80, 0.8, shared=0.8, turns=0.3),
    "agent": Mix(9000, 200, 1.0, shared=0.9, prefixes=64, prefix=3072, turns=0.6, longest=120_000),
    "plain": Mix(2048, 256, 0.5),
}


def draw(mix: Mix, rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Poisson arrivals at ``rate`` requests a second."""
    source = np.random.default_rng(seed)
    numbers = count(mix.prefixes * -(-mix.prefix // BLOCK))
    earlier: list[tuple[tuple[int, ...], int]] = []
    at_s = 0.0
    while True:
        at_s += source.exponential(1 / rate)
        if at_s >= seconds:
            return
        new, output = _lengths(mix, source)
        blocks, start = _begin(mix, source, earlier)
        prompt = min(start + new, mix.longest)
        blocks = blocks[: prompt // BLOCK]
        more = -(-prompt // BLOCK) - len(blocks)
        blocks += tuple(next(numbers) for _ in range(more))
        if mix.turns:
            earlier.append((blocks, prompt + output))
            del earlier[:-4096]
        yield Arrival(at_s, prompt, output, blocks)


def _lengths(mix: Mix, source: np.random.Generator) -> tuple[int, int]:
    if not mix.cv:
        return round(mix.prompt), round(mix.output)
    sigma = np.log(1 + mix.cv**2) ** 0.5
    factors = np.exp(source.normal(-(sigma**2) / 2, sigma, 2))
    new, output = np.maximum((factors * (mix.prompt, mix.output)).astype(int), 1).tolist()
    return new, output


def _begin(
    mix: Mix, source: np.random.Generator, earlier: list[tuple[tuple[int, ...], int]]
) -> tuple[tuple[int, ...], int]:
    """Blocks and tokens that the prompt begins with."""
    if earlier and source.random() < mix.turns:
        blocks, num_tokens = earlier[int(source.integers(len(earlier)))]
        if num_tokens < mix.longest // 2:
            return blocks[: num_tokens // BLOCK], num_tokens
    if source.random() < mix.shared:
        size = mix.prefix // BLOCK
        first = int(source.integers(mix.prefixes)) * size
        return tuple(range(first, first + size)), mix.prefix
    return (), 0
