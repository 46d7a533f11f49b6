"""Generated programs of the frontend language, run by one frontend against a server.

    python bench/lang_compare.py run --frontend radixlm --url URL --count 500 -o ours.jsonl
    python bench/lang_compare.py run --frontend sglang --url URL --count 500 -o theirs.jsonl
    python bench/lang_compare.py compare ours.jsonl theirs.jsonl

The second needs SGLang's package in its own environment, and both RADIXLM_LANG_TEMPLATE=reference,
since SGLang takes chat templates by the model's path. Programs are drawn by a seed: text, gen,
select, roles, fork, join, variables, scopes, greedy and seeded. Compared are texts, variables,
messages and the keys of meta_info.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from typing import Any

WORDS = "the sky is blue and seven cats walk home What is 3 + 4 ? Tell me more .".split()
CHOICES = ([" yes", " no"], [" red", " blue", " green"], ["1", "2", "three"])


def draw(rng: random.Random, depth: int = 0) -> list[Any]:
    """The steps of a program, as data."""
    steps: list[Any] = [["text", _words(rng)]]
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["text", "gen", "gen", "select", "role", "role", "scope", "fork"])
        if kind == "text":
            steps.append(["text", _words(rng)])
        elif kind == "gen":
            steps.append(["gen", _name(rng), _params(rng)])
        elif kind == "select":
            steps.append(["select", _name(rng), rng.choice(CHOICES), rng.randint(0, 2)])
        elif kind == "role" and depth == 0:
            role = rng.choice(["user", "assistant"])
            inner = (
                [["text", _words(rng)]] if role == "user" else [["gen", _name(rng), _params(rng)]]
            )
            steps.append(["role", role, inner])
        elif kind == "scope":
            steps.append(["scope", _name(rng), [["gen", None, _params(rng)]]])
        elif kind == "fork" and depth == 0:
            branches = [[["text", _words(rng)], ["gen", "f", _params(rng)]] for _ in range(3)]
            steps.append(["fork", branches])
    return steps


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(2, 8))) + " "


def _name(rng: random.Random) -> str:
    return f"v{rng.randrange(10**6)}"


def _params(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "temperature": 0}
    more = rng.randrange(6)
    if more == 0:
        found["stop"] = rng.choice([".", [" ", "\n"], "e"])
    elif more == 1:
        found["regex"] = rng.choice(["[a-z]{2,6}", "(one|two|three)", "[0-9]+"])
    elif more == 2:
        found["dtype"] = rng.choice(["int", "bool"])
    elif more == 3:
        found["frequency_penalty"] = 0.5
    elif more == 4:
        found["return_logprob"] = True
    return found


def apply(sgl: Any, s: Any, steps: list[Any]) -> None:
    """Append the steps to a state."""
    methods = (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    )
    for kind, *rest in steps:
        if kind == "text":
            s += rest[0]
        elif kind == "gen":
            params = {k: v for k, v in rest[1].items() if k != "dtype"}
            dtype = {"int": int, "bool": bool}.get(rest[1].get("dtype"))
            s += sgl.gen(rest[0], dtype=dtype, **params)
        elif kind == "select":
            s += sgl.select(rest[0], list(rest[1]), choices_method=methods[rest[2]])
        elif kind == "role":
            with getattr(s, rest[0])():
                apply(sgl, s, rest[1])
        elif kind == "scope":
            with s.var_scope(rest[0]):
                apply(sgl, s, rest[1])
        else:
            group = s.fork(len(rest[0]))
            for child, branch in zip(group, rest[0], strict=True):
                apply(sgl, child, branch)
            group.join()


def names(steps: list[Any]) -> list[str]:
    """The variables of a program's own state."""
    found = []
    for kind, *rest in steps:
        if kind in ("gen", "select") and rest[0]:
            found.append(rest[0])
        elif kind == "scope":
            found += [rest[0], *names(rest[1])]
        elif kind == "role":
            found += names(rest[1])
        elif kind == "fork":
            found.append("f")
    return found


def run(args: argparse.Namespace) -> int:
    sgl = importlib.import_module(args.frontend)
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.url))
    programs = [draw(random.Random(f"{args.seed} {n}")) for n in range(args.count)]

    @sgl.function
    def program(s: Any, steps: Any) -> None:
        apply(sgl, s, steps)

    with open(args.output, "w", encoding="utf-8") as file:
        for steps in programs:
            state = program.run(steps=steps)
            told: dict[str, Any] = {"text": state.text(), "messages": state.messages()}
            told["variables"] = {name: state[name] for name in names(steps)}
            metas = {name: state.get_meta_info(name) for name in names(steps) if name != "f"}
            told["meta"] = {n: sorted(m) if isinstance(m, dict) else None for n, m in metas.items()}
            file.write(json.dumps(told) + "\n")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print how many programs differ, and the first of them."""
    ours, theirs = (list(map(json.loads, open(path, encoding="utf-8"))) for path in args.files)
    different = 0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        fields = [name for name in one if one[name] != other[name]]
        if fields:
            different += 1
            if different <= args.show:
                print(number, *(f"{name}: {one[name]!r} / {other[name]!r}" for name in fields))
    print(f"{different} of {len(ours)} programs differ")
    return int(different > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("run")
    one.add_argument("--frontend", default="radixlm", choices=["radixlm", "sglang"])
    one.add_argument("--url", default="http://127.0.0.1:30000")
    one.add_argument("--count", type=int, default=500)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("-o", "--output", required=True)
    one.set_defaults(run=run)
    two = verbs.add_parser("compare")
    two.add_argument("files", nargs=2)
    two.add_argument("--show", type=int, default=3)
    two.set_defaults(run=compare)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
