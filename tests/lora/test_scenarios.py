"""What the reference's tests of adapters do: series of loads, unloads and requests, whose outputs
are those of a server that has all adapters from the start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.lora_adapters import write_adapter
from tests.fakes.tiny_checkpoint import cached_tiny
from tests.lora.test_serving import ARCH, GREEDY, IDS, Served, serving

Step = tuple[str, Any]
LOAD, UNLOAD, ASK = "load", "unload", "ask"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of three ranks and sets of modules."""
    root, base = tmp_path_factory.mktemp("adapters"), cached_tiny(ARCH)
    kinds = {"a": (2, r"[qv]_proj$"), "b": (5, r"_proj$"), "c": (8, r"(gate|up|down)_proj$")}
    return {
        name: write_adapter(base, root / name, rank, pattern, seed=rank)
        for name, (rank, pattern) in kinds.items()
    }


@pytest.fixture(scope="module")
async def wanted(folders: dict[str, Path]) -> dict[str | None, list[int]]:
    """Of a server that has all adapters, in the three forms of --lora-paths."""
    a, b, c = folders.values()
    paths = [f"a={a}", f'{{"lora_name": "b", "lora_path": "{b}", "pinned": true}}', str(c)]
    async with serving(lora_paths=paths, disable_radix_cache=True) as served:
        names = {None: None, "a": "a", "b": "b", "c": str(c)}
        found = {key: await served.tokens(0, name) for key, name in names.items()}
    assert len({str(tokens) for tokens in found.values()}) == len(found)
    return found


async def play(
    served: Served, folders: dict[str, Path], wanted: dict[str | None, list[int]], *steps: Step
) -> None:
    """Each step must work; ``ask`` of several names at once is one batch."""
    for what, name in steps:
        if what == LOAD:
            loaded = await served.load(name, folders[name])
            assert loaded["success"] and name in loaded["loaded_adapters"]
        elif what == UNLOAD:
            assert name not in (await served.unload(name))["loaded_adapters"]
        else:
            body = {"input_ids": [IDS[0]] * len(name), "sampling_params": GREEDY}
            rows = (await served.post("/generate", lora_path=name, **body)).json()
            assert [row["output_ids"] for row in rows] == [wanted[one] for one in name]


SERIES: dict[str, tuple[dict[str, Any], list[Step]]] = {
    "no path at the start": (
        {"max_lora_rank": 256, "lora_target_modules": ["all"]},
        [
            (LOAD, "a"), (ASK, ["a", None]), (LOAD, "b"), (LOAD, "c"), (ASK, ["c", "a", None, "b"]),
            (UNLOAD, "b"), (ASK, ["a", "c"]), (LOAD, "b"), (ASK, ["b", "b", "a"]), (UNLOAD, "a"),
            (UNLOAD, "c"), (UNLOAD, "b"), (ASK, [None]), (LOAD, "c"), (ASK, ["c"]),
        ],
    ),
    "two at a time": (
        {"max_loras_per_batch": 2},
        [(LOAD, "a"), (LOAD, "b"), (LOAD, "c"), (ASK, ["a", "b", "c", None, "a", "b", "c"])],
    ),
    "two loaded": (
        {"max_loaded_loras": 2, "max_loras_per_batch": 2},
        [
            (LOAD, "a"), (LOAD, "b"), (ASK, ["a"]), (ASK, ["b", None]), (LOAD, "c"),
            (ASK, ["c", "b"]), (ASK, ["a"]), (ASK, ["b"]), (ASK, ["c"]), (UNLOAD, "a"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERIES)
async def test_series(
    name: str, folders: dict[str, Path], wanted: dict[str | None, list[int]]
) -> None:
    options, steps = SERIES[name]
    async with serving(disable_radix_cache=True, **options) as served:
        await play(served, folders, wanted, *steps)


async def test_limits_refuse_by_their_numbers(folders: dict[str, Path]) -> None:
    async with serving(max_lora_rank=5, lora_target_modules=["q_proj", "v_proj"]) as served:
        assert (await served.load("a", folders["a"]))["success"]
        assert "changes down_proj" in (await served.load("b", folders["b"]))["error_message"]
        rank = (await served.load("c", folders["c"]))["error_message"]
        assert "rank 8 is above the limit of 5" in rank
        assert list((await served.unload("a"))["loaded_adapters"]) == []
        assert "does not exist" in (await served.unload("a"))["error_message"]


async def test_one_pin_of_two_places(
    folders: dict[str, Path], wanted: dict[str | None, list[int]]
) -> None:
    async with serving(max_loras_per_batch=2, max_loaded_loras=2) as served:
        assert (await served.load("a", folders["a"], pinned=True))["success"]
        for words in ("not allowed to pin all slots", "starvation"):
            refused = await served.load("b", folders["b"], pinned=True)
            assert words in refused["error_message"]
        await play(
            served, folders, wanted, (LOAD, "b"), (LOAD, "c"), (ASK, ["a", "c"]), (ASK, ["b", "a"])
        )
        assert "a" in served.engine.intake.adapters.loaded  # never dropped


async def test_a_new_version_takes_over_while_requests_run(
    folders: dict[str, Path], wanted: dict[str | None, list[int]]
) -> None:
    """No request fails and each has the tokens of one of the versions."""
    versions: dict[str, str] = {}
    async with serving() as served:
        await served.load("x@1", folders["a"])
        versions["x@1"] = "a"
        is_over, answers = False, 0

        async def traffic() -> None:
            nonlocal answers
            while not is_over:
                body = {"input_ids": IDS[0], "sampling_params": GREEDY, "lora_path": "x"}
                row = (await served.post("/generate", **body)).json()
                assert row["output_ids"] == wanted[versions[row["meta_info"]["lora_name"]]]
                answers += 1

        clients = [asyncio.ensure_future(traffic()) for _ in range(3)]
        for number, name in enumerate(("b", "c", "a", "b"), 2):
            versions[f"x@{number}"] = name
            assert (await served.load(f"x@{number}", folders[name]))["success"]
            row = await served.post("/generate", input_ids=IDS[0], lora_path="x")
            assert row.json()["meta_info"]["lora_name"] == f"x@{number}"
            assert (await served.unload(f"x@{number - 1}"))["success"]
        chat = await served.post(
            "/v1/completions", prompt=IDS[0], model="x", max_tokens=4, temperature=0
        )
        assert chat.status_code == 200 and chat.json()["model"] == "x"
        is_over = True
        await asyncio.gather(*clients)
        assert answers >= 12
        gone = await served.post("/generate", input_ids=IDS[0], lora_path="x@1")
        assert gone.status_code == 400
        await served.unload("x@5")
        none = await served.post("/generate", input_ids=IDS[0], lora_path="x")
        assert none.status_code == 400 and "not loaded" in none.text
