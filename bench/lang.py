"""Costs of the frontend language: `python bench/lang.py [--reference PATH]`.

Prints the time of `import radixlm as sgl` and a first decorator, of 1,000 programs of two gens and
five roles on a backend that answers at once, and of 1,000 programs of one gen of 4 tokens beside
the same prompts as one list call of the engine. With --reference (the folder of SGLang's package,
and --python its interpreter) the first two are measured there too, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

NULL = """
import json, sys, time
begin = time.perf_counter()
import {name} as sgl
@sgl.function
def first(s): s += sgl.gen("a")
imported = time.perf_counter() - begin
from {name}.lang.backend.base_backend import BaseBackend
from {name}.lang.chat_template import get_chat_template
class Null(BaseBackend):
    is_immediate = True
    def __init__(self):
        super().__init__()
        self.chat_template = get_chat_template("default")
    def get_chat_template(self): return self.chat_template
    def cache_prefix(self, text): pass
    def generate(self, s, sampling_params): return "x", {{}}
@sgl.function
def talk(s, q):
    s += sgl.system("a")
    s += sgl.user(q)
    s += sgl.assistant(sgl.gen("a"))
    s += sgl.user("more")
    s += sgl.assistant(sgl.gen("b"))
backend, times = Null(), []
for _ in range(5):
    begin = time.perf_counter()
    talk.run_batch([("q",)] * 1000, backend=backend)
    times.append(time.perf_counter() - begin)
print(json.dumps([imported, sorted(times)[2]]))
"""


def measure(python: str, name: str, path: str | None) -> list[float]:
    """[seconds of the import, seconds of 1,000 null programs] of one frontend."""
    env = {"PATH": "", **({"PYTHONPATH": path} if path else {})}
    done = subprocess.run(
        [python, "-c", NULL.format(name=name)], env=env, capture_output=True, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_gen(count: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of ``count`` programs of one gen, and of one list call, in turn."""
    import radixlm as sgl  # noqa: PLC0415 - the import is measured in processes of its own

    @sgl.function
    def program(s: Any, text: str) -> None:
        s += text + sgl.gen("a", max_tokens=4, ignore_eos=True, temperature=0)

    prompts = [f"What is {number} + 4?" for number in range(count)]
    params = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
    programs, lists = [], []
    with sgl.Engine(log_level="error") as engine:
        for _ in range(rounds + 1):
            engine.flush_cache()
            begin = time.perf_counter()
            program.run_batch([(text,) for text in prompts], backend=engine)
            programs.append(time.perf_counter() - begin)
            engine.flush_cache()
            begin = time.perf_counter()
            engine.generate(prompts, params)
            lists.append(time.perf_counter() - begin)
    return programs[1:], lists[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reference", help="the folder that has SGLang's package")
    parser.add_argument("--python", default=sys.executable, help="the reference's interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    frontends = [("radixlm", sys.executable, None)]
    if args.reference:
        frontends.append(("sglang", args.python, args.reference))
    found: dict[str, list[list[float]]] = {name: [] for name, *_ in frontends}
    for _ in range(args.rounds):
        for name, python, path in frontends:
            found[name].append(measure(python, name, path))
    for name, rows in found.items():
        imported, null = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name}: import and decorator {imported * 1e3:.0f} ms, 1,000 programs {null:.3f} s")
    programs, lists = one_gen(1000, args.rounds)
    ratios = [one / other for one, other in zip(programs, lists, strict=True)]
    print(
        f"1,000 programs of one gen: {statistics.median(programs):.2f} s, as one list call "
        f"{statistics.median(lists):.2f} s, ratio {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
