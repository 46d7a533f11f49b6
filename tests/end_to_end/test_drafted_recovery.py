"""The engine process dies while a drafter drafts: in each phase of a step, once or twice in a row,
the answers are those of a run that nothing disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixlm.engine.model_info import ASSETS, ZOO
from tests.end_to_end.server import RunningServer
from tests.engine.test_draft_models import DEEPSEEK, with_layers

MODELS = (ASSETS / "radix-tiny", ZOO / "radix-tiny-draft", ZOO / "radix-tiny-eagle3")
pytestmark = pytest.mark.skipif(
    not all((folder / "config.json").is_file() for folder in MODELS),
    reason="the bundled model or its drafts are not built",
)
# phase -> module, class and method behind which the process dies, of a step that verifies drafts
PHASES = {
    "plan": ("radixlm.scheduler.planner", "Planner", "plan"),
    "verify": ("radixlm.executor.runner", "Runner", "forward"),
    "draft": ("radixlm.speculative.device.model_drafter", "ModelDrafter", "_write"),
    "propose": ("radixlm.speculative.ngram", "NgramDrafter", "propose"),
    "sample": ("radixlm.executor.runner", "Runner", "sample"),
    "commit": ("radixlm.scheduler.commit", "Committer", "commit"),
}
# run by every Python process of the server: the file of a phase says how often it still kills
SITE = """
import importlib.abc, importlib.util, os, signal, sys
FOLDER, PHASES, CALLS = {folder!r}, {phases!r}, 12

def deadly(method, phase):
    num_calls = 0
    def run(*args, **kwargs):
        nonlocal num_calls
        found = method(*args, **kwargs)
        num_calls += 1
        if num_calls > CALLS:
            with open(os.path.join(FOLDER, phase), "r+") as file:
                left = int(file.read())
                if left:
                    file.seek(0)
                    file.write(str(left - 1))
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
        return found
    return run

def patched(module):
    for phase, (name, owner, method) in PHASES.items():
        if name == module.__name__:
            cls = getattr(module, owner)
            setattr(cls, method, deadly(getattr(cls, method), phase))
    if module.__name__ == "radixlm.engine.drafting":
        lengths = module.DraftLength
        module.DraftLength = lambda most, *args: lengths(most, always=True)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        names = [one[0] for one in PHASES.values()] + ["radixlm.engine.drafting"]
        if name not in names:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            patched(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
BODIES: list[dict[str, Any]] = [
    {
        "text": f"Count from {n} to twenty, then say the days of the week.",
        "sampling_params": {"max_new_tokens": 48, "ignore_eos": True, "temperature": 0.6 * n}
        | {"sampling_seed": n},
    }
    for n in range(3)
]


def model_of(algorithm: str, folder: Path) -> str | None:
    """The model that the drafter is for; None: the bundled one."""
    if algorithm != "NEXTN":
        return None
    architecture, old, at, names = DEEPSEEK
    return with_layers(architecture, folder / "model", old, at, **names)


DRAFTERS = ("STANDALONE", "NGRAM", "NEXTN", "EAGLE3 4", "STANDALONE 4")  # branches of trees
SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in DRAFTERS]


@pytest.fixture(scope="module", params=["EAGLE3", *SLOW])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Path, list[str]]]:
    """A server, the folder of the files that kill, and the phases of the drafter."""
    folder, (algorithm, *branches) = tmp_path_factory.mktemp("deaths"), request.param.split()
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder), phases=PHASES))
    for phase in PHASES:
        (folder / phase).write_text("0")
    other = "draft" if algorithm == "NGRAM" else "propose"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        flags = ("--speculative-algorithm", algorithm, "--speculative-num-steps", "3")
        if branches:
            more = ("--speculative-eagle-topk", *branches, "--speculative-num-draft-tokens", "12")
            flags = (*flags, *more)
        model = model_of(algorithm, folder)
        with RunningServer(*flags, "--max-engine-restarts", "50", model=model) as running:
            yield running, folder, [phase for phase in PHASES if phase != other]


async def answers(url: str) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        posts = [client.post("/generate", json=body) for body in BODIES]
        return [one.json()["output_ids"] for one in await asyncio.gather(*posts)]


async def test_deaths_in_each_phase(
    server: tuple[RunningServer, Path, list[str]], request: pytest.FixtureRequest
) -> None:
    """Two in a row while the drafter drafts; the slow cases, in each phase."""
    running, folder, phases = server
    is_slow = request.node.get_closest_marker("slow") is not None
    wanted = await answers(running.url)
    assert running.info()["avg_spec_accept_length"] > 1.02
    for phase in phases:
        (folder / phase).write_text("2" if is_slow or phase == "draft" else "1")
        # the last phase may have ended with a death that the server has not noticed yet
        async with asyncio.timeout(60):
            while not running.engines():
                await asyncio.sleep(0.05)
        before = running.engine().pid
        assert await answers(running.url) == wanted, phase
        assert (folder / phase).read_text() == "0", phase
        running.wait_ready()
        assert running.engine().pid != before
    assert running.info()["num_breaches"] == 0
