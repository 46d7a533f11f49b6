"""`radixlm replay`: a crash dump is validated, sent again and compared."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import radixlm
from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.crash_dump import Recorder
from radixlm.entrypoints import replay
from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import Finish
from radixlm.wire.requests import GrammarSpec, TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams
from tests.fakes.tiny_checkpoint import cached_tiny

DONE = {"kind": "length"}


def record(**fields: Any) -> dict[str, Any]:
    whole = {"rid": "r", "input_ids": [1], "sampling_params": {}, "finish_reason": DONE}
    return {**whole, "output_ids": [5, 6], **fields}


@pytest.mark.parametrize(
    ("fields", "got", "is_same"),
    [
        ({}, [5, 6], True),
        ({}, [5, 7], False),
        ({}, [5], False),
        ({}, [5, 6, 7], False),
        ({"finish_reason": None}, [5, 6, 7], True),
        ({"finish_reason": None}, [5], False),
        ({"finish_reason": {"kind": "abort"}, "output_ids": []}, [9], True),
    ],
)
def test_answers_are_compared(fields: dict[str, Any], got: list[int], is_same: bool) -> None:
    assert (replay.judge(record(**fields), {"output_ids": got}) is None) == is_same


def test_unsupported_requests_are_skipped_and_counted() -> None:
    records = [
        record(),
        record(pooling="last"),
        record(num_media=1),
        record(grammar={"kind": "lark", "value": "x"}),
        record(output_ids=[9, 9]),
        record(input_ids=[0]),
    ]

    def send(body: dict[str, Any]) -> dict[str, Any]:
        if body["input_ids"] == [0]:
            raise replay.Refused("status 503")
        return {"output_ids": [5, 6]}

    told: list[str] = []
    found = replay.replay(records, send, 2, told.append)
    assert dict(found) == {"same": 1, "skipped": 3, "different": 1, "failed": 1}
    assert any("token 0 is 5, it was 9" in line for line in told)


def test_embeddings_come_back_as_rows() -> None:
    rows = np.arange(6, dtype="<f4").reshape(2, 3)
    text = base64.b64encode(rows.tobytes()).decode()
    body = replay.as_body(record(input_ids=None, embeds=text, num_embeds=2))
    assert body["input_embeds"] == rows.tolist() and "input_ids" not in body


@pytest.mark.parametrize(
    "content", ["", "no json", "[1]", '{"radixlm_requests": 2}', "{}", "\x80\x04pickle"]
)
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="crash-dump"):
        replay.read_dump(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        replay.read_dump(str(tmp_path / "none"))


def test_a_real_dump_is_replayed_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(cached_tiny("Qwen3ForCausalLM"))
    recorder = Recorder(tmp_path, ServerConfig.from_kwargs(model_path=model), lambda: ())
    options: dict[str, Any] = {"cpu_threads": 1, "max_total_tokens": 4096, "log_level": "error"}
    params = [
        {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True},
        {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 5, "regex": "[ab]{3}"},
    ]
    with radixlm.Engine(model_path=model, **options) as engine:
        answers = [engine.generate(input_ids=[7, 8, 9], sampling_params=p) for p in params]
    for index, (each, answer) in enumerate(zip(params, answers, strict=True)):
        sampling = SamplingParams.from_dict(each)
        grammar = GrammarSpec("regex", str(sampling.regex)) if sampling.regex else None
        wire = TokenizedRequest(f"r{index}", pack_ids([7, 8, 9]), sampling, grammar=grammar)
        state = RequestState(wire, 0, None, None)
        state.output_ids = answer["output_ids"]
        recorder.ended(state, Finish(answer["meta_info"]["finish_reason"]["type"]))
    path = recorder.write("test", recorder.entries())
    flags = ["--cpu-threads", "1", "--max-total-tokens", "4096", "--log-level", "error"]
    assert replay.main([str(path), *flags]) == 0
    assert "2 same, 0 different, 0 failed, 0 skipped" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["output_ids"][3] ^= 1
    path.write_text("\n".join([lines[0], json.dumps(changed)]))
    assert replay.main([str(path), *flags]) == 1
    assert "token 3 is" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no request 'x'"):
        replay.main([str(path), "--rid", "x"])
    with pytest.raises(ConfigError, match="has its options already"):
        replay.main([str(path), "--url", "http://127.0.0.1:1", "--log-level", "error"])
