"""The registry of adapters, with engines that answer at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.lora.registry import KEEP, LOAD, MAX_NAME, UNLOAD, AdapterOptions, AdapterRegistry
from radixlm.wire.replies import ControlReply


class Engines:
    """What the registry needs of intake. ``refused``: paths that cannot be read."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.calls: list[tuple[str, int]] = []
        self.refused: set[str] = set()
        self.kept: list[int] | None = None
        self.deaths = 0
        self.observers = ()
        self.ready = asyncio.Event()
        self.ready.set()

    async def control_each(self, verb: str, **args: Any) -> list[ControlReply]:
        if self.deaths:
            self.deaths -= 1
            raise Overloaded("the engine restarts")
        self.calls.append((verb, args["number"]))
        await asyncio.sleep(0)
        facts = {"digest": f"d{args['number']}", "rank": 8, "invocation": (), "num_bytes": 64}
        facts["seconds"] = 0.5
        return [ControlReply("c", args.get("path") not in self.refused, "no such file", facts)]

    def ask(self, replica: Any, verb: str, args: dict[str, Any]) -> asyncio.Future[ControlReply]:
        if verb == KEEP:
            self.kept = args["numbers"]
            return asyncio.ensure_future(asyncio.sleep(0, ControlReply("c", True)))
        return asyncio.ensure_future(self._replied(args))

    async def _replied(self, args: dict[str, Any]) -> ControlReply:
        return (await self.control_each(LOAD, **args))[0]

    def use(self, rid: str, registry: AdapterRegistry, name: str) -> None:
        self.requests[rid] = SimpleNamespace(wire=SimpleNamespace(adapter=registry.ref(name)))


def registry_of(engines: Engines, **options: Any) -> AdapterRegistry:
    given: Any = engines
    return AdapterRegistry(given, AdapterOptions(is_enabled=True, served_name="m", **options))


@pytest.mark.parametrize("name", ["", "m", ":a", "a\n", "a" * (MAX_NAME + 1)])
async def test_names_of_no_adapter(name: str) -> None:
    registry = registry_of(Engines())
    with pytest.raises(InvalidRequest) as caught:
        await registry.load(name, "/a")
    assert caught.value.param == "lora_name" and not registry.loaded
    await registry.load("a" * MAX_NAME, "/a")
    with pytest.raises(InvalidRequest, match="give the folder"):
        await registry.load("b", "")


async def test_a_name_is_replaced_only_on_demand_and_serves_to_the_end() -> None:
    engines = Engines()
    registry = registry_of(engines)
    await registry.load("a", "/1")
    with pytest.raises(InvalidRequest, match="already loaded from /1"):
        await registry.load("a", "/2")
    engines.use("r", registry, "a")
    await registry.load("a", "/2", replaces=True)
    assert registry.loaded == {"a": "/2"} and engines.calls == [(LOAD, 0), (LOAD, 1)]
    new = registry.ref("a")
    assert new is not None and (new.number, new.digest) == (1, "d1")
    engines.requests.clear()
    await asyncio.gather(*registry._tasks)
    assert engines.calls[2:] == [(UNLOAD, 0)]
    await registry.unload("a")
    assert not registry.loaded and engines.calls[3:] == [(UNLOAD, 1)]
    with pytest.raises(InvalidRequest, match="does not exist"):
        await registry.unload("a")
    with pytest.raises(InvalidRequest, match="not loaded"):
        registry.ref("a")


async def test_the_idle_one_that_was_used_longest_ago_makes_room_and_comes_back() -> None:
    engines = Engines()
    registry = registry_of(engines, max_loaded=3, max_pinned=1)
    for name in "abc":
        await registry.load(name, f"/{name}", is_pinned=name == "a")
        registry.entries[-1].used_s = float(ord(name))
    with pytest.raises(InvalidRequest, match="1 are pinned, at most 1"):
        await registry.load("d", "/d", is_pinned=True)
    engines.use("r", registry, "b")
    await registry.load("d", "/d")
    assert list(registry.loaded) == ["a", "b", "d"] and "c" in registry
    engines.use("s", registry, "d")
    with pytest.raises(InvalidRequest, match="pinned: a; busy: b, d"):
        await registry.load("e", "/e")
    coming = asyncio.ensure_future(registry.prepare("c"))  # a request waits for the users of b
    while "c" not in registry.loaded:
        await asyncio.sleep(0)
    assert list(registry.loaded) == ["a", "d", "c"] and not coming.done()
    del engines.requests["r"]
    await coming
    assert (registry.num_loads, registry.num_evicted) == (5, 2)


async def test_requests_for_more_adapters_than_may_be_loaded_take_turns() -> None:
    engines = Engines()
    registry = registry_of(engines, max_loaded=1)
    for name in "ab":
        await registry.load(name, f"/{name}")

    async def serve(number: int) -> None:
        name = "ab"[number % 2]
        await registry.prepare(name)
        assert list(registry.loaded) == [name]
        engines.use(str(number), registry, name)
        await asyncio.sleep(0)
        del engines.requests[str(number)]

    await asyncio.gather(*map(serve, range(6)))


async def test_one_that_cannot_be_read_leaves_nothing() -> None:
    engines = Engines()
    engines.refused = {"/bad"}
    registry = registry_of(engines)
    with pytest.raises(InvalidRequest, match="no such file"):
        await registry.load("a", "/bad")
    assert not registry.loaded and registry.num_failed == 1
    assert engines.calls == [(LOAD, 0), (UNLOAD, 0)]
    engines.deaths = 1  # the next engine reads it
    await registry.load("a", "/good")
    assert registry.loaded == {"a": "/good"}
    off = AdapterRegistry(engines, AdapterOptions())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        await off.load("a", "/good")
    with pytest.raises(InvalidRequest, match="--tokenizer-worker-num"):
        await registry_of(engines, is_shared=True).load("a", "/good")


async def outcomes(*work: Any) -> list[str]:
    """What each of these loads ends with, run side by side."""
    found = await asyncio.gather(*work, return_exceptions=True)
    return ["" if one is None else str(one) for one in found]


async def test_loads_side_by_side() -> None:
    """As if one came after the other: a name has one load, nothing is above a limit or kept."""
    engines = Engines()
    registry = registry_of(engines, max_loaded=2, max_pinned=1)
    await registry.load("a", "/a")
    await registry.load("b", "/b")
    first, second = await outcomes(registry.load("x", "/1"), registry.load("x", "/2"))
    assert not first and "already loaded from /1" in second
    assert list(registry.loaded) == ["b", "x"] and engines.calls[2:] == [(UNLOAD, 0), (LOAD, 2)]
    found = await outcomes(registry.load("y", "/y", True), registry.load("z", "/z", True))
    assert "" in found and "1 are pinned" in max(found)
    assert await outcomes(registry.prepare("a"), registry.prepare("a")) == ["", ""]
    assert len(registry.loaded) == 2 and registry.ref("a")
    numbers = [n for verb, n in engines.calls if verb == LOAD]
    engines.calls.clear()
    await outcomes(registry.load("a", "/3", replaces=True), registry.load("a", "/4", replaces=True))
    await asyncio.gather(*registry._tasks)
    new = registry.ref("a")
    assert registry.loaded["a"] == "/4" and new is not None
    gone = {n for verb, n in engines.calls if verb == UNLOAD}
    assert gone == {numbers[-1], new.number - 1} and len(numbers) == len(set(numbers))


async def test_a_caller_who_leaves_and_an_unload_on_the_way() -> None:
    engines = Engines()
    registry = registry_of(engines)
    await registry.load("a", "/1")
    assert not registry.was_unloaded("a")
    leaving = asyncio.ensure_future(registry.load("a", "/2", replaces=True))
    while (LOAD, 1) not in engines.calls:
        await asyncio.sleep(0)
    leaving.cancel()
    await registry.unload("a")
    await asyncio.gather(*registry._tasks)
    assert not registry.loaded and registry.was_unloaded("a") and not registry.was_unloaded("b")
    assert sorted(engines.calls) == [(LOAD, 0), (LOAD, 1), (UNLOAD, 0), (UNLOAD, 1)]


async def test_an_engine_that_starts_while_an_adapter_is_read_reads_it_too() -> None:
    engines = Engines()
    registry = registry_of(engines)
    await registry.load("a", "/a")
    loading = [
        asyncio.ensure_future(registry.load("b", "/b")),
        asyncio.ensure_future(registry.load("a", "/2", replaces=True)),
    ]
    while len(engines.calls) < 3:
        await asyncio.sleep(0)
    replica: Any = SimpleNamespace()
    registry.restore(replica)
    await asyncio.gather(*loading)
    await asyncio.gather(*registry._tasks)
    assert sorted(engines.kept or ()) == [0, 1, 2] and registry.loaded == {"a": "/2", "b": "/b"}
    assert sorted(engines.calls[:6]) == sorted([(LOAD, n) for n in (0, 1, 2)] * 2)
    assert engines.calls[6:] == [(UNLOAD, 0)]


async def test_an_http_process_that_starts_unloads_no_adapter_of_the_others() -> None:
    engines = Engines()
    registry = registry_of(engines, is_shared=True, initial=(("a", "/1", False),))
    replica: Any = SimpleNamespace()
    registry.restore(replica)
    await asyncio.gather(*registry._tasks)
    registry.restore(replica)
    await asyncio.gather(*registry._tasks)
    assert engines.kept is None and engines.calls == [(LOAD, 0), (LOAD, 0)]
