"""Random deaths, aborts, disconnects, retractions and pauses. Every stream that ends normally has
the tokens of the undisturbed run, and no resource leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.simulation import World
from tests.fakes.executor import reference
from tests.fakes.tiers import DictTier


def _disturb(world: World) -> None:
    rng = world.rng
    kind = rng.choices(
        ("nothing", "submit", "leave", "abort", "pause", "continue"), (8, 6, 1, 1, 1, 2)
    )[0]
    running = [c for c in world.clients if c.end is None and not c.has_left and not c.state.ended]
    if kind == "submit" and len(world.clients) < 60:
        prompt = [7] * rng.choice((0, 9)) + [
            rng.randrange(1, 31) for _ in range(rng.randint(1, 30))
        ]
        world.submit(prompt, rng.randint(1, 40), rng.random() < 0.7)
    elif kind == "leave" and running:
        client = rng.choice(running)
        client.read()
        client.has_left = True
        world.intake.leave([client.state])
    elif kind == "abort" and running:
        world.intake.abort(rng.choice(running).state.rid)
    elif kind == "pause":
        world.control("pause", mode=rng.choice(("in_place", "retract")))
    elif kind == "continue":
        world.control("continue")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
async def test_streams_equal_the_undisturbed_run(seed: int, depth: int, tmp_path: Path) -> None:
    tiers = [DictTier(), DictTier("storage")] if seed % 2 else []
    world = World(seed * 10 + depth, tmp_path, tiers, num_pages=48, depth=depth, reserve=0.1)
    for tick in range(500):
        # the draws alone may give fewer than three deaths while requests run
        is_late = world.num_deaths < min(3, tick // 50)
        world.death_rate = 0.5 if is_late else 0.02
        _disturb(world)
        world.tick()
        for client in world.clients:
            if world.rng.random() < 0.3:
                client.read()
    world.calm_down(3000)
    kinds = {"stop": 0, "length": 0, "abort": 0, "left": 0, "error": 0}
    for client in world.clients:
        client.read()
        want = reference(client.prompt, client.max_new, client.ignore_eos)
        if client.has_left:
            kinds["left"] += 1
            assert client.ids == want[: len(client.ids)]
            continue
        assert client.end is not None and client.end.finish is not None, "a stream never ended"
        kind = client.end.finish.kind
        kinds[kind] += 1
        assert client.ids == (want if kind in ("stop", "length") else want[: len(client.ids)])
        # random deaths can hit the same single request twice
        assert kind != "error" or "died 2 times" in (client.end.finish.message or "")
    assert world.num_deaths >= 3 and kinds["length"] >= 10, (world.num_deaths, kinds)
    assert kinds["error"] <= 2
    world.check_invariants()
    for tier in tiers[:1]:
        assert tier.pages and sum(copy.num_got for copy in world.copies)


async def test_one_that_kills_every_engine_fails_alone(tmp_path: Path) -> None:
    world = World(1, tmp_path, num_pages=64)
    world.poison = 30
    # the poison is a token; other outputs must not contain it, because they may be recomputed
    pure = [[i, j] for i in range(1, 30) for j in range(1, 30)]
    pure = [p for p in pure if 30 not in reference(p, 30, True)][:6]
    good = [world.submit(prompt, 30) for prompt in pure[:5]]
    for _ in range(4):
        world.tick()
    bad = world.submit([8, 30, 9], 10)
    later = world.submit(pure[5], 10)
    for _ in range(400):
        world.tick()
    for client in world.clients:
        client.read()
    assert bad.end is not None and bad.end.finish is not None and bad.ids == []
    assert (bad.end.finish.kind, bad.end.finish.status) == ("error", 500)
    assert "died 2 times" in (bad.end.finish.message or "")
    for client in (*good, later):
        assert client.end is not None and client.ids == reference(
            client.prompt, client.max_new, True
        )
    assert world.num_deaths == 3  # one in a batch, two alone
    world.check_invariants()


async def test_a_full_queue_does_not_refuse_requests_that_ran(tmp_path: Path) -> None:
    world = World(2, tmp_path, num_pages=64, max_running=4, max_queued=3)
    clients = []
    for i in range(6):
        clients.append(world.submit([3 + i, 4], 20))
        world.tick()
    world.die()
    for _ in range(200):
        world.tick()
    for client in clients:
        client.read()
        assert client.ids == reference(client.prompt, client.max_new, True)
