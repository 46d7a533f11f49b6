"""The loop without work."""

from __future__ import annotations

from tests.fakes.scheduler_harness import SchedulerHarness

from radixlm.wire.replies import Heartbeat


def test_invariants_are_checked_and_repaired_after_an_idle_second() -> None:
    bench = SchedulerHarness()
    bench.submit("r", [1] * 20, 3, ignore_eos=True)
    bench.run()
    lost = bench.kv_manager.pages.alloc(2)  # owned by no request
    assert lost is not None
    free = bench.kv_manager.pages.num_free
    bench.tick()
    assert bench.scheduler.controls.num_breaches == 0
    bench.now_s += 2
    bench.tick()
    assert bench.scheduler.controls.num_breaches > 0
    assert bench.kv_manager.pages.num_free == free + 2
    found = bench.scheduler.controls.num_breaches
    bench.now_s += 2
    bench.tick()
    assert bench.scheduler.controls.num_breaches == found


def test_heartbeats_are_sent_while_idle() -> None:
    bench = SchedulerHarness()
    for _ in range(5):
        bench.now_s += 1.1
        bench.tick()
    beats = [r for r in bench.replies if isinstance(r, Heartbeat)]
    assert len(beats) == 5
    assert beats[-1].load.num_running == 0
    assert bench.scheduler._max_wait_s() >= 0.5  # it sleeps instead of polling
