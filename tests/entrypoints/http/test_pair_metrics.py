"""The figures of prefill and decode servers have the reference's names."""

from __future__ import annotations

import pytest

from radixlm.entrypoints.http.admin.metrics import pair_gauges
from radixlm.observe.metrics import COUNTERS, PAIR_GAUGES, Buckets, Metrics


def test_a_decode_server_reports_its_fetches() -> None:
    tiers = {
        "jobs": 3.0, "peer_num_pulling": 2.0, "peer_pulls_whole": 3.0, "peer_pulls_part": 1.0,
        "peer_bytes_shm": 3e9, "peer_bytes_tcp": 1e9, "peer_copy_seconds": 2.0,
        "peer_bootstrap_failed": 1.0, "peer_refused": 1.0, "peer_transfer_failed": 5.0,
        "peer_bootstrap_seconds": 0.5, "peer_num_bootstraps": 5.0,
    }  # fmt: skip
    found = pair_gauges(tiers)
    assert found["num_decode_transfer_queue_reqs"] == 2
    assert found["num_decode_prealloc_queue_reqs"] == 1
    assert found["num_bootstrap_failed_reqs_total"] == 2
    assert found["num_transfer_failed_reqs_total"] == 5
    assert found["kv_transfer_speed_gb_s"] == pytest.approx(2.0)
    assert found["kv_transfer_latency_ms"] == pytest.approx(500)
    assert found["kv_transfer_bootstrap_ms"] == pytest.approx(100)
    assert found["kv_transfer_total_mb"] == pytest.approx(4000)


def test_a_prefill_server_reports_what_it_holds() -> None:
    found = pair_gauges(
        {"jobs": 7.0, "peer_num_rooms": 4.0, "peer_num_inflight": 2.0, "peer_sent_bytes_tcp": 8.0}
    )
    assert found["num_prefill_prealloc_queue_reqs"] == 4
    assert found["num_prefill_inflight_queue_reqs"] == 2
    assert found["num_decode_prealloc_queue_reqs"] == 0
    assert found["radixlm:kv_transfer_tcp_bytes"] == 8


def test_all_names_are_exposed_and_none_by_other_servers() -> None:
    assert pair_gauges({"host_pages": 1.0}) == {}
    found = pair_gauges({"peer_num_rooms": 1.0})
    assert set(PAIR_GAUGES) < set(found) <= {*PAIR_GAUGES, *COUNTERS}
    metrics = Metrics({"model_name": "m"}, Buckets())
    assert b"kv_transfer" not in metrics.exposition({})
    text = metrics.exposition(found).decode()
    assert 'sglang:num_prefill_prealloc_queue_reqs{model_name="m"} 1.0' in text
