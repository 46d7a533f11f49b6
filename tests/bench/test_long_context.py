"""`radixlm bench long-context` on the bundled model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixlm.base.errors import ConfigError
from radixlm.bench.long_context import main

SMALL = ["--max-total-tokens", "1024", "--cpu-threads", "1", "--log-level", "error"]


def test_lengths_are_measured(capsys: Any) -> None:
    asked = ["--lengths", "300", "100", "--output-len", "4", *SMALL]
    assert main([*asked, "--json"]) == 0
    short, long = map(json.loads, capsys.readouterr().out.strip().splitlines())
    assert [short["length"], long["length"]] == [100, 300]
    for one in (short, long):
        assert one["first_token_s"] > 0 and one["token_s"] > 0 and one["rss_bytes"] > 1 << 26
        assert one["prefill_tokens_per_s"] == pytest.approx(one["length"] / one["first_token_s"])
    assert long["kv_resident_bytes"] >= short["kv_resident_bytes"]
    assert main(asked) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "tokens",
        "100",
        "300",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lengths", "0"], "--lengths"),
        (["--lengths", "5000", *SMALL], "--max-total-tokens N"),
        (["--output-len", "1"], "--output-len"),
    ],
)
def test_wrong_options_are_named(options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(options)
