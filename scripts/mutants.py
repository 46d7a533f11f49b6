"""Mutation testing: small mistakes, one at a time, that the mirrored tests must notice.

`make mutants` draws mutants of the packages below (cosmic-ray makes them), runs the tests of the
same package on each, and prints those that survive as diffs. The exit status is 1 if less than
`--goal` of them are killed. Mutants that change nothing a user could see are listed in
`scripts/equivalent_mutants.txt` and do not count.

Files are changed in place and put back, so the working tree must be clean.
"""

import argparse
import ast
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(
    "scheduler memory sampling intake engine text executor speculative parallel cuda_graphs media "
    "live_feed continuation weight_updates warm_restart kv_events".split()
)
EQUIVALENTS = ROOT / "scripts" / "equivalent_mutants.txt"
TIMEOUT_FACTOR, TIMEOUT_MARGIN_S = 3, 20
Position = tuple[int, int]


def main() -> int:
    """Draw mutants until the time is over; the exit status."""
    args = _arguments()
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT).returncode:
        sys.exit("src/ has uncommitted changes: commit or stash them, mutants are made in place")
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # files are put back
    known = EQUIVALENTS.read_text(encoding="utf-8") if EQUIVALENTS.exists() else ""
    limits_s = {package: _limit_s(package) for package in args.packages}
    counts: Counter[tuple[str, str]] = Counter()
    until_s = time.monotonic() + 60 * args.minutes
    for package, mutation in _draw(args.packages, args.seed):
        if time.monotonic() > until_s or sum(counts.values()) >= args.most:
            break
        result = mutate_and_test([mutation], _command(package), limits_s[package])
        if result.test_outcome is None:  # nothing to change there
            continue
        outcome = result.test_outcome.value
        change = _change(result.diff or "")
        if outcome == "survived" and change in known:
            outcome = "equivalent"
        counts[package, outcome] += 1
        place = f"{mutation.module_path}:{mutation.start_pos[0]}"
        print(f"{outcome:10} {place} {mutation.operator_name}", flush=True)
        if outcome == "survived":
            print(change, flush=True)
    return _report(counts, args.packages, args.goal)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="of src/radixlm")
    parser.add_argument("--minutes", type=float, default=60, help="time for all mutants (60)")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="mutants at most")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--goal", type=float, default=0.9, help="share that must be killed (0.9)")
    return parser.parse_args()


def _command(package: str) -> str:
    flags = "-n 0 -q -x -p no:cacheprovider -m 'not slow and not gpu'"
    return f"{shlex.quote(sys.executable)} -m pytest {flags} tests/{package}"


def _limit_s(package: str) -> float:
    """Time limit of the package's tests on a mutant, from a run without one."""
    began_s = time.monotonic()
    subprocess.run(shlex.split(_command(package)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    took_s = time.monotonic() - began_s
    print(f"tests/{package} without a mutant: {took_s:.1f} s", flush=True)
    return TIMEOUT_FACTOR * took_s + TIMEOUT_MARGIN_S


def _draw(packages: Sequence[str], seed: int) -> Iterator[tuple[str, Any]]:
    """Mutants without end, the packages in turn; a file is drawn by its size. None comes twice."""
    rng, seen = random.Random(seed), set()
    paths = {p: sorted((Path("src/radixlm") / p).rglob("*.py")) for p in packages}
    sizes = {p: [path.stat().st_size for path in paths[p]] for p in packages}
    while True:
        for package in packages:
            (path,) = rng.choices(paths[package], sizes[package])
            mutants = _mutants(path)
            index = rng.randrange(len(mutants)) if mutants else 0
            if mutants and (path, index) not in seen:
                seen.add((path, index))
                yield package, mutants[index]


@cache
def _mutants(path: Path) -> list[Any]:
    """All mutants of a file, but those of annotations."""
    with tempfile.TemporaryDirectory() as folder:
        with use_db(str(Path(folder) / "session.sqlite"), WorkDB.Mode.create) as db:
            init([path], db, {})
            mutations = [mutation for item in db.work_items for mutation in item.mutations]
    spans = _without_effect(path)
    kept = [mutation for mutation in mutations if not _is_inside(mutation, spans)]
    return sorted(kept, key=lambda mutation: (mutation.operator_name, mutation.occurrence))


def _without_effect(path: Path) -> list[tuple[Position, Position]]:
    """Where a change has no effect: annotations, protocols, strict zips."""
    found: list[ast.expr | ast.stmt] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            found.append(node.annotation)
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion
            found.append(node.value)
        elif isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
            found += node.body
    return [
        ((n.lineno, n.col_offset), (n.end_lineno or n.lineno, n.end_col_offset or 0)) for n in found
    ]


def _is_inside(mutation: Any, spans: list[tuple[Position, Position]]) -> bool:
    return any(first <= tuple(mutation.start_pos) < end for first, end in spans)


def _change(diff: str) -> str:
    """The changed lines of a diff: ``-old`` and ``+new``, without their numbers."""
    lines = (line.rstrip() for line in diff.splitlines())
    return "\n".join(x for x in lines if x[:1] in ("+", "-") and x[:3] not in ("+++", "---"))


def _report(counts: Counter[tuple[str, str]], packages: Sequence[str], goal: float) -> int:
    killed = survived = 0
    for package in packages:
        dead = counts[package, "killed"] + counts[package, "incompetent"]
        alive, same = counts[package, "survived"], counts[package, "equivalent"]
        print(f"{package:10} {dead} killed, {alive} survived, {same} equivalent")
        killed, survived = killed + dead, survived + alive
    share = killed / max(1, killed + survived)
    print(f"{killed} of {killed + survived} killed: {share:.1%} (goal {goal:.0%})")
    return int(share < goal)


if __name__ == "__main__":
    sys.exit(main())
