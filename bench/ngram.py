"""Decode speed with --speculative-algorithm NGRAM over that without, for answers of known text.

    python bench/ngram.py --kind edit --batch 4 --answer 128 [server options]

The model computes every step; its draws are then replaced by the answer's tokens, so that random
weights do. Words of the repository's own files are the tokens. In turn, without and with drafts.

edit   the prompt is an older version of the file whose newest version is the answer
copy   the answer is the prompt, with a quarter of its tokens replaced in runs of three
other  the prompt is another file: short matches, few of which go on alike
none   random tokens: nothing repeats
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.base.record import replace
from radixlm.bench.cli import run
from radixlm.bench.one_batch import Batch, Shape, with_room
from radixlm.bench.options import positive
from radixlm.config.parser import parse
from radixlm.config.verb_parser import VerbParser
from radixlm.engine.model_info import resolved
from radixlm.wire.replies import StepReply
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams

Ints = NDArray[np.int32]
ROOT = Path(__file__).parent.parent
LEAST_SHARED = 0.7  # of the tokens of an edited file, those that the older version has too


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout


def tokens_of(text: str, vocab: int) -> Ints:
    words = re.findall(r" ?\w{1,7}|\s+|[^\w\s]", text)
    return np.array([3 + zlib.crc32(word.encode()) % (vocab - 3) for word in words], np.int32)


def pairs(kind: str, length: int, vocab: int, since: str) -> Iterator[tuple[Ints, Ints]]:
    """Prompts and their answers of ``length`` tokens."""
    rng = np.random.default_rng(7)
    while kind == "none":
        yield rng.integers(3, vocab, 256, np.int32), rng.integers(3, vocab, length, np.int32)
    old = git("rev-list", "-1", f"--before={since}", "HEAD").strip()
    paths = [path for path in git("ls-files", "src").split() if path.endswith(".py")]
    rng.shuffle(paths)
    before = np.zeros(0, np.int32)
    for path in paths:
        text = tokens_of(git("show", f"HEAD:{path}"), vocab)
        if len(text) < length + 20:
            continue
        before, last, answer = text, before, text[:length]
        if kind == "other" and len(last):
            yield last[:256], answer
        elif kind == "copy":
            answer = answer.copy()
            for at in np.flatnonzero(rng.random(length) < 0.1).tolist():
                answer[at : at + 3] = rng.integers(3, vocab, len(answer[at : at + 3]))
            yield text[:length], answer
        elif kind == "edit":
            older = tokens_of(git("show", f"{old}:{path}"), vocab)
            shared = len(np.intersect1d(older, text)) / len(np.unique(text))
            if len(older) > length and shared >= LEAST_SHARED and older.tobytes() != text.tobytes():
                yield older[: 2 * length], answer


class Scripted(Batch):
    """A batch whose answers are given."""

    pairs: Sequence[tuple[Ints, Ints]] = ()
    num_left = 0

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        runner: Any = self.replica.scheduler.executor
        inner, states = runner.sampler.sample, runner.tables.states

        def sample(logits_RV: Any, slots: Any, positions_R: Any, *rest: Any) -> Any:
            drafts: Any
            found, drafts = inner(logits_RV, slots, positions_R, *rest), rest[-1]
            tokens_R = found.tokens_R.clone()
            for row, (slot, position) in enumerate(zip(slots, positions_R.tolist(), strict=True)):
                prompt, answer = self.pairs[int(states[slot].rid.split("-")[1])]
                tokens_R[row] = int(answer[min(position - len(prompt), len(answer) - 1)])
            accepted = None if drafts is None else drafts.accept(tokens_R)
            return replace(found, tokens_R=tokens_R, accepted=accepted)

        runner.sampler.sample = sample

    def decode(self, pairs: Sequence[tuple[Ints, Ints]], drafts: bool) -> tuple[float, int]:
        """Seconds and steps of the decodes of these answers."""
        self.pairs, drafting = pairs, self.replica.scheduler.drafting
        assert drafting is not None
        drafting.lengths.is_off = not drafts
        drafting.flush()
        self.flush()
        self._num_runs, self.num_left, steps = self._num_runs + 1, len(pairs), 0
        for number, (prompt, answer) in enumerate(pairs):
            sampling = SamplingParams(max_new_tokens=len(answer), temperature=0.0, ignore_eos=True)
            rid = f"{self._num_runs}-{number}"
            self._mine.send(TokenizedRequest(rid, input_ids=pack_ids(prompt), sampling=sampling))
        self._tick()
        began_s = time.perf_counter()
        while self.num_left:
            self._tick()
            steps += 1
        return time.perf_counter() - began_s, steps

    def _tick(self) -> None:
        self.replica.scheduler.tick(wait=False)
        for reply in self._mine.receive(0):
            if isinstance(reply, StepReply):
                self.num_left -= sum(delta.finish is not None for delta in reply.deltas)


def main(argv: Sequence[str]) -> int:
    parser = VerbParser("bench/ngram.py", __doc__ or "", usage="python bench/ngram.py [options]")
    parser.add_argument("--kind", choices=("edit", "copy", "other", "none"), default="edit")
    parser.add_argument("--since", default="2026-11-22 20:00", help="date of the older version")
    for name, default in (("--batch", 4), ("--answer", 128), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=default)
    args, rest = parser.parse_known_args(argv)
    positive([args.batch, args.answer, args.rounds], "--batch, --answer and --rounds")
    words = ["--speculative-algorithm", "NGRAM", "--skip-tokenizer-init", *rest]
    config, given = parse(words, prog="bench/ngram.py")
    shapes = [Shape(args.batch, max(256, 2 * args.answer), args.answer)]
    config, info = resolved(*with_room(config, given, shapes))
    bench, ratios = Scripted(config, info, 1), list[float]()
    made = pairs(args.kind, args.answer, info.decoder.vocab, args.since)
    # all at first: git between two rounds would make the next run slower
    batches = [[next(made) for _ in range(args.batch)] for _ in range(args.rounds + 1)]
    for number, batch in enumerate(batches, -1):  # the first one warms up
        seconds: dict[bool, tuple[float, int]] = {}
        for drafts in (False, True) if number % 2 else (True, False):
            seconds[drafts] = bench.decode(batch, drafts)
        if number >= 0:
            ratios.append(seconds[False][0] / seconds[True][0])
            print(f"{ratios[-1]:.3f}, steps {seconds[False][1]} -> {seconds[True][1]}", flush=True)
    print(f"{args.kind} {args.batch}: median {statistics.median(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(run("bench/ngram.py", main, sys.argv[1:]))
