"""`radixlm bench perplexity` beside transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scheduler.test_streaming_window import visible

from radixlm.base.errors import ConfigError
from radixlm.bench.perplexity import _line, main, stream_of
from radixlm.engine.model_info import ASSETS
from radixlm.wire.requests import StreamingWindow

TINY = ASSETS / "radix-tiny"


def test_it_is_that_of_transformers(tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "Count from 1 to 5: 1, 2, 3, 4, 5. What is 17 + 25? It is 42. " * 6
    file = tmp_path / "text.txt"
    file.write_text(text)
    options = ["--text", str(file), "--context", "64", "--dtype", "float32", "--json"]
    options += ["--model-path", str(TINY), "--against", str(TINY)]
    assert main(options) == 0
    first, second = map(json.loads, capsys.readouterr().out.strip().splitlines())
    ids = AutoTokenizer.from_pretrained(TINY)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    losses = []
    with torch.inference_mode():
        for piece in torch.split(ids[0], 64):
            if len(piece) > 1:
                logp = model(piece[None]).logits[0, :-1].log_softmax(-1)
                losses.append(-logp.gather(1, piece[1:, None])[:, 0])
    wanted = math.exp(float(torch.cat(losses).mean()))
    assert first["num_tokens"] == sum(map(len, losses))
    assert first["perplexity"] == pytest.approx(wanted, rel=1e-3)
    assert first["low"] < wanted < first["high"]
    assert second["ratio"] == 1.0


def test_a_stream_is_seen_through_its_window() -> None:
    ids, window = list(range(100)), StreamingWindow(16, 2)
    pieces = stream_of(ids, window)
    predicted = [token for piece, start in pieces for token in piece[start:]]
    assert predicted == ids[1:]
    for piece, start in pieces:
        for place in range(start, len(piece)):
            assert piece[:place] == visible(ids[: piece[place]], window)


def test_a_stream_within_its_window_is_a_piece(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Count from 1 to 5: 1, 2, 3, 4, 5. ")
    options = ["--text", str(file), "--json", "--model-path", str(TINY)]
    found = []
    for more in (["--context", "64"], ["--streaming-window", "60"], ["--streaming-window", "16"]):
        assert main([*options, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    values = [one["perplexity"] for one in found]
    assert values[0] == values[1] != values[2]
    assert found[0]["low"] is found[1]["high"] is None and found[2]["low"] < values[2]
    assert ["95 % within" in _line(one) for one in found] == [False, False, True]


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--text", "nowhere"], "--text"), (["--text", __file__, "--context", "1"], "--context")],
)
def test_wrong_options_are_named(options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(options)
