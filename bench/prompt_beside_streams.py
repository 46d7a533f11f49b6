"""Time between two tokens of streams while the prompt of another request is computed.

    PYTHONPATH=src python bench/prompt_beside_streams.py --model-path FOLDER [--streams 4]
        [--prompt 4000] [--target-itl-ms 100] [other options of the engine]

FOLDER needs only a config.json: weights are random. A --target-itl-ms of 1000000 gives whole
chunks. Prints the median time alone and, beside the prompt, the median, the 99th percentile and
the longest, in ms; the share above 1.3 times --target-itl-ms, or what the engine aims at without
it; and the seconds of the prompt.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from radixlm.bench.offline import engine_options
from radixlm.config.verb_parser import VerbParser
from radixlm.entrypoints.offline import Engine
from radixlm.step_sizes.pacing import TIMES, UNNOTICED_S

ALONE_S = 3.0


def main() -> int:
    parser = VerbParser("prompt_beside_streams.py", "Streams beside a prompt.")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens")
    args, rest = parser.parse_known_args(sys.argv[1:])
    given = ["--load-format", "dummy", "--skip-tokenizer-init", "--log-level", "error"]
    options = engine_options([*given, *rest], parser)
    rng, times, ends = np.random.default_rng(0), list[tuple[float, float]](), threading.Event()
    with Engine(max_total_tokens=args.prompt + 3000 * args.streams, **options) as engine:
        vocab = engine.info.decoder.vocab

        def follow(prompt: list[int]) -> None:
            forever = {"max_new_tokens": 2900, "temperature": 0.0, "ignore_eos": True}
            last_s = None
            for _ in engine.generate(input_ids=prompt, sampling_params=forever, stream=True):
                now_s = time.perf_counter()
                if last_s is not None:
                    times.append((now_s, now_s - last_s))
                last_s = now_s
                if ends.is_set():
                    return

        prompts = rng.integers(5, vocab - 5, (args.streams, 32)).tolist()
        followers = [threading.Thread(target=follow, args=(one,)) for one in prompts]
        for one in followers:
            one.start()
        time.sleep(ALONE_S)
        begin_s = time.perf_counter()
        long = rng.integers(5, vocab - 5, args.prompt).tolist()
        engine.generate(input_ids=long, sampling_params={"max_new_tokens": 1, "temperature": 0.0})
        end_s = time.perf_counter()
        ends.set()
        for one in followers:
            one.join()
    alone = np.array([gap for at, gap in times if begin_s - ALONE_S / 2 < at < begin_s])
    beside = np.array([gap for at, gap in times if begin_s < at < end_s])
    target_s = (options.get("target_itl_ms") or 0.0) / 1e3
    target_s = target_s or max(UNNOTICED_S, TIMES * float(np.median(alone)))
    middle, late, longest = (1e3 * np.percentile(beside, q) for q in (50, 99, 100))
    print(
        f"alone {1e3 * np.median(alone):.1f} ms; beside: median {middle:.1f}, 99 % {late:.1f}, "
        f"longest {longest:.1f}; above 1.3 x {1e3 * target_s:.0f} ms: "
        f"{100 * (beside > 1.3 * target_s).mean():.1f} %; prompt {end_s - begin_s:.2f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
