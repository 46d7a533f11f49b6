"""How long the parts of a request took: in the log, and in meta_info."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import scripted_server

from radixlm.base.errors import ConfigError

BODY = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "rid": "one"}
LINE = re.compile(
    r"Req Time Stats\(rid=one, input len=(\d+), output len=3, type=unified\): "
    r"queue_duration=([\d.]+)ms, forward_duration=([\d.]+)ms, first_token=([\d.]+)ms, "
    r"start_time=([\d.]+)"
)


async def test_a_line_of_the_log_tells_the_parts(
    toy_folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.time()
    async with scripted_server(toy_folder, {}, enable_request_time_stats_logging=True) as made:
        with caplog.at_level(logging.INFO, "radixlm.requests"):
            answer = (await made.post("/generate", **BODY)).json()
    (found,) = (match for r in caplog.records if (match := LINE.fullmatch(r.getMessage())))
    num_prompt, queue_ms, forward_ms, first_ms, start = map(float, found.groups())
    meta = answer["meta_info"]
    assert num_prompt == meta["prompt_tokens"]
    assert queue_ms == pytest.approx(1e3 * meta["queue_time"], abs=0.01)
    total_ms = queue_ms + forward_ms
    assert 0 < first_ms <= total_ms + 0.02 <= 1e3 * meta["e2e_latency"] + 0.05
    assert began <= start <= time.time()


async def test_a_file_has_the_metrics_of_each_request(toy_folder: Any, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    options: dict[str, Any] = {"export_metrics_to_file": True}
    async with scripted_server(
        toy_folder, {}, export_metrics_to_file_dir=str(folder), **options
    ) as made:
        meta = (await made.post("/generate", **BODY)).json()["meta_info"]
        assert (await made.client.get("/health_generate")).status_code == 200
        await made.post("/v1/completions", prompt="secret", max_tokens=2)
    (file,) = folder.iterdir()
    assert re.fullmatch(r"sglang-request-metrics-\d{8}_\d\d\.log", file.name)
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["id"] == "one" and "secret" not in file.read_text()
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason"):
        assert first[name] == meta[name]
    assert 0 < first["time_to_first_token"] <= first["e2e_latency"]
    assert json.loads(second["request_parameters"])["sampling_params"]["max_new_tokens"] == 2
    with pytest.raises(ConfigError, match="--export-metrics-to-file-dir"):
        async with scripted_server(toy_folder, {}, **options):
            pass


async def test_meta_info_has_times_with_metrics_only(toy_folder: Any) -> None:
    async with scripted_server(toy_folder, {}) as made:
        assert (
            "request_received_ts" not in (await made.post("/generate", **BODY)).json()["meta_info"]
        )
    began = time.time()
    async with scripted_server(toy_folder, {}, enable_metrics=True) as made:
        meta = (await made.post("/generate", **BODY)).json()["meta_info"]
        end = (await made.events("/generate", **BODY, stream=True))[-1]
        one = {**BODY, "sampling_params": {"max_new_tokens": 1}}
        short = (await made.post("/generate", **one)).json()["meta_info"]
    for got in (meta, end["meta_info"]):
        spent_s = got["request_finished_ts"] - got["request_received_ts"]
        assert spent_s == pytest.approx(got["e2e_latency"], abs=1e-3)
        assert began <= got["request_received_ts"] <= got["response_sent_to_client_ts"]
        assert got["decode_throughput"] > 2 / spent_s  # the first token took a part of the time
    assert "decode_throughput" not in short
