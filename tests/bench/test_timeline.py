"""Windows of a run against sums by hand; the page names no other origin."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from radixlm.bench.backends import Outcome
from radixlm.bench.plot import write_plot
from radixlm.bench.timeline import timeline, waterfall

RUN = [
    Outcome(True, start_s=10.0, ttft_s=1.0, latency_s=4.0, num_output=30),
    Outcome(True, start_s=12.0, ttft_s=0.5, latency_s=2.0, num_output=15),
    Outcome(False, start_s=11.0, latency_s=0.5, error="<b>broken</b>"),
]


def test_windows() -> None:
    found = timeline(RUN, num_windows=4)
    assert found is not None
    assert found.at_s.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert found.running.tolist() == [1.0, 1.0, 2.0, 2.0]
    # ten tokens a second from 1 s to 4 s, and ten from 2.5 s to 4 s
    assert found.tokens_s.tolist() == [0.0, 10.0, 15.0, 20.0]
    assert found.ttft_ms[99][0] == 1000.0 and found.e2e_ms[50][2] == 2000.0
    assert np.isnan(found.ttft_ms[50][[1, 3]]).all()
    assert found.tokens_s.sum() == pytest.approx(45)
    assert timeline(RUN[2:]) is None


def test_the_page_holds_all_charts_and_no_other_origin(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    write_plot(str(path), RUN, "run")
    text = path.read_text()
    for title in (
        "Time to first token (ms)",
        "Time to first token over time",
        "End-to-end latency over time",
        "Output tokens/s against concurrent",
        "Requests: until",
    ):
        assert f"<h2>{title}" in text
    assert text.count("<g>") == 3 and "&lt;b&gt;broken" in text and "<b>" not in text
    assert not re.search(r"https?:|<script|<link|@import|src=", text)
    assert "each 4th" in waterfall(RUN * 400)


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(str(tmp_path / "p.png"), RUN, "run")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
