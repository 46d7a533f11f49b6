"""Figures against hand counts, and the files and plots made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from radixlm.base.errors import ConfigError
from radixlm.bench import metrics, report
from radixlm.bench.backends import Outcome
from radixlm.bench.datasets import Row
from radixlm.bench.plot import check_plot, page, percentile_curves, write_plot

GOOD = [
    Outcome(True, ttft_s=0.1, latency_s=0.5, itls_s=[0.1, 0.3], num_prompt=10, num_output=3,
            num_cached=4, text="Hello world"),
    Outcome(True, ttft_s=0.3, latency_s=0.3, num_prompt=20, num_output=1),
]  # fmt: skip
BAD = Outcome(False, "refused", 429, num_prompt=99, num_output=99, ttft_s=9.0, latency_s=9.0)


def test_only_requests_that_succeeded_count() -> None:
    got = metrics.summarise([*GOOD, BAD], duration_s=2.0)
    assert (got["completed"], got["failed"]) == (2, 1)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (30, 4)
    assert (got["input_throughput"], got["output_throughput"]) == (15.0, 2.0)
    assert (got["total_throughput"], got["request_throughput"]) == (17.0, 1.0)
    assert got["concurrency"] == pytest.approx(0.4) and got["total_cached_tokens"] == 4
    assert got["mean_ttft_ms"] == pytest.approx(200) and got["max_ttft_ms"] == pytest.approx(300)
    assert got["mean_tpot_ms"] == pytest.approx(200)  # (0.5 - 0.1) / 2, the first request only
    assert got["median_itl_ms"] == pytest.approx(200)
    assert got["p99_e2e_latency_ms"] == pytest.approx(np.percentile([500, 300], 99))


def test_no_request_succeeded() -> None:
    got = metrics.summarise([BAD], duration_s=1.0)
    assert got["completed"] == 0 and got["mean_itl_ms"] == 0.0 and json.dumps(got)


def test_missing_token_counts_are_filled_in(tokenizer) -> None:
    rows = [Row("x", None, 5, 9), Row("y", None, 6, 9), Row("z", None, 7, 9)]
    told = Outcome(True, num_prompt=1, num_output=2)
    untold, failed = Outcome(True, text="Hello world"), Outcome(False)
    metrics.count_missing([told, untold, failed], rows, tokenizer)
    assert (told.num_prompt, told.num_output) == (1, 2)
    assert (untold.num_prompt, untold.num_output) == (6, len(tokenizer.encode("Hello world")))
    assert (failed.num_prompt, failed.num_output) == (7, 0)


def test_results_are_appended_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    report.append_jsonl(str(file), [{"a": 1}])
    report.append_jsonl(str(file), [{"a": 2}, {"a": "é"}])
    assert [json.loads(line)["a"] for line in file.read_text().splitlines()] == [1, 2, "é"]
    with pytest.raises(ConfigError, match="cannot write"):
        report.check_writable(str(tmp_path / "no" / "folder"))


def test_columns_line_up() -> None:
    lines = report.table(("name", "ms"), [("a", "1.0"), ("longer", "10.0")]).splitlines()
    assert lines == ["name      ms", "a        1.0", "longer  10.0"]


def test_the_page_draws_each_curve_and_escapes_its_title(tmp_path: Path) -> None:
    html = page(percentile_curves([*GOOD, BAD]), "<b> & c")
    assert html.count("<svg") == 3 and "&lt;b&gt; &amp; c" in html and "http" not in html
    places = [float(y) for _, y in re.findall(r"([\d.]+),([\d.]+)", html.split("polyline")[1])]
    assert len(places) >= 201 and places[:201] == sorted(places[:201], reverse=True)
    write_plot(str(tmp_path / "p.html"), [BAD], "none")
    assert "No request succeeded" in (tmp_path / "p.html").read_text()


def test_a_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_plot("p.png")
    write_plot(str(tmp_path / "p.png"), GOOD, "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_other_plot_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png or \.html"):
        check_plot("p.jpg")
    with pytest.raises(ConfigError, match="--plot"):
        write_plot(str(tmp_path / "no" / "p.html"), GOOD, "title")
