"""Other projects' programs against the real server: a router, benchmarks and an evaluation.

``scripts/test-clients`` installs sglang-router and lm-eval. sglang (its benchmark) is used where it
is installed, and the Vercel AI SDK where the variable ``AI_SDK`` names a folder with its packages.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixlm.engine.model_info import ASSETS, DEFAULT_MODEL

MODEL = str(ASSETS / DEFAULT_MODEL)
BUNDLED = ASSETS / "evals" / "bundled.jsonl"
EMPTY = "<think>\n\n</think>\n\n"  # what the template puts before an answer without thinking
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(command: list[str], folder: Path) -> str:
    env = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf")}
    made = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
    return made.stdout


@pytest.fixture
def router_url(client_url: str) -> Iterator[str]:
    if find_spec("sglang_router") is None:
        pytest.skip("pip install sglang-router")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", client_url]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics)]
    made = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while time.monotonic() < until_s:
            try:
                if httpx.get(url + "/readiness", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                assert made.poll() is None
            time.sleep(0.1)
        yield url
    finally:
        made.terminate()
        made.wait(30)


def test_sglang_router(router_url: str) -> None:
    """It adds fields to every body, and reads the worker's information by the newer names."""
    with httpx.Client(base_url=router_url, timeout=60) as client:
        params = {"max_new_tokens": 5, "temperature": 0}
        whole = client.post("/generate", json={"text": "Hello", "sampling_params": params})
        assert whole.status_code == 200 and whole.json()["output_ids"]
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        chat |= {"model": DEFAULT_MODEL, "temperature": 0}
        text = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
        lines = client.post("/v1/chat/completions", json=chat | {"stream": True}).text
        chunks = [json.loads(line[6:]) for line in lines.splitlines() if "data: {" in line]
        deltas = [c["choices"][0]["delta"]["content"] or "" for c in chunks]
        assert "".join(deltas) == text["content"]
        for path in ("/get_model_info", "/v1/models", "/health_generate", "/workers"):
            assert client.get(path).status_code == 200, path
        assert client.post("/flush_cache").status_code == 200
        wrong = client.post("/generate", json={"text": "a", "sampling_params": {"top_p": 5}})
        assert wrong.status_code == 400


def test_sglang_bench_serving(client_url: str, tmp_path: Path) -> None:
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed")
    program = Path(found.submodule_search_locations[0]) / "bench_serving.py"
    turns = [
        {"from": "human", "value": "What is a sparrow? " * 4},
        {"from": "gpt", "value": "A " * 9},
    ]
    rows = [{"id": str(i), "conversations": turns} for i in range(20)]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    host, port = client_url.removeprefix("http://").split(":")
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat", "lmdeploy"):
        command = [sys.executable, str(program), "--backend", backend, "--host", host]
        command += ["--port", port, "--dataset-name", "sharegpt", "--dataset-path", "chats.json"]
        command += ["--num-prompts", "4", "--sharegpt-output-len", "6", "--model", MODEL]
        run([*command, "--output-file", "out.jsonl"], tmp_path)
        found_row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
        assert found_row["completed"] == 4 and found_row["total_output_tokens"] == 24


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: rows.json}}
test_split: train
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
metric_list: [{{metric: {metric}}}]
{more}
"""


def test_lm_eval(client_url: str, tmp_path: Path) -> None:
    """Completions with its own tokenizer and with the server's give equal numbers."""
    pytest.importorskip("lm_eval")
    choices = 'doc_to_choice: "{{c}}"'
    until = "generation_kwargs: {until: ['.'], max_gen_toks: 8, temperature: 0}"
    for name, kind, text, target, metric, more in (
        ("mc", "multiple_choice", "{{q}}", "0", "acc", choices),
        ("rolling", "loglikelihood_rolling", "", "{{q}}", "word_perplexity", ""),
        ("words", "generate_until", "{{q}}", "x", "exact_match", until),
    ):
        task = TASK.format(name=name, kind=kind, text=text, target=target, metric=metric, more=more)
        (tmp_path / f"{name}.yaml").write_text(task)
    rows = [{"q": f"{i}: the sky is", "c": [" blue", " very old and red"]} for i in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    results = []
    for api, options, tasks in (
        ("completions", f"tokenizer={MODEL}", "mc,rolling,words"),
        ("completions", "tokenizer_backend=remote", "mc,rolling,words"),
        ("chat/completions", f"tokenizer={MODEL},num_concurrent=2", "words"),
    ):
        kind = "local-chat-completions" if "chat" in api else "local-completions"
        command = [sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", tasks]
        url = f"model={DEFAULT_MODEL},base_url={client_url}/v1/{api},{options}"
        command += [
            "--model_args",
            url,
            "--include_path",
            ".",
            "--output_path",
            f"out{len(results)}",
        ]
        run([*command, *(["--apply_chat_template"] if "chat" in api else [])], tmp_path)
        (report,) = (tmp_path / f"out{len(results)}").rglob("results_*.json")
        results.append(json.loads(report.read_text())["results"])
    assert results[0]["rolling"] == results[1]["rolling"] and results[0]["mc"] == results[1]["mc"]
    assert "words" in results[2]


ITEMS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: rows.json}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{{text}}}}}"
doc_to_target: "{{{{{target}}}}}"
metric_list: [{{metric: {metric}}}]
{more}
"""


def test_lm_eval_and_radixlm_eval_agree_item_by_item(client_url: str, tmp_path: Path) -> None:
    """Both ask a server for the bundled model's items: by a text, in a chat and by likelihood."""
    pytest.importorskip("lm_eval")
    rows = [
        {"question": row["messages"][0]["content"], "answer": row["answer"]}
        for row in map(json.loads, BUNDLED.read_text().splitlines())
        if row["task"] in ("add3", "sub3", "copy", "sort", "upper", "spell", "count", "compare")
    ]
    for i, row in enumerate(rows):
        row["text"] = (
            f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
        )
        others = [rows[(i + k) % len(rows)]["answer"] for k in (0, 1, 2)]
        row |= {"context": row["text"], "choices": others, "right": 0}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    texts = [{"question": row["text"], "answer": row["answer"]} for row in rows]
    files = {"text": texts, "chat": rows, "mc": [{**row, "answer": 0} for row in rows]}
    for name, made in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    until = "generation_kwargs: {until: ['<|im_end|>'], max_gen_toks: 64, temperature: 0}"
    listed = 'target_delimiter: ""\ndoc_to_choice: "{{choices}}"'
    agreed = {}
    for name, kind, text, target, metric, more, api in (
        ("text", "generate_until", "text", "answer", "exact_match", until, "completions"),
        ("chat", "generate_until", "question", "answer", "exact_match", until, "chat/completions"),
        ("mc", "multiple_choice", "context", "right", "acc", listed, "completions"),
    ):
        (tmp_path / f"{name}.yaml").write_text(
            ITEMS.format(name=name, kind=kind, text=text, target=target, metric=metric, more=more)
        )
        theirs = _lm_eval_samples(tmp_path, name, f"{client_url}/v1/{api}")
        task = "choices" if name == "mc" else "exact"
        command = [sys.executable, "-m", "radixlm", "eval", task, "--data-path", f"{name}.jsonl"]
        command += ["--url", client_url, "--details", f"{name}.details", "--max-tokens", "64"]
        command += ["--api", "chat" if name == "chat" else "completions", "--json"]
        run([*command, "--extra-request-body", '{"stop": ["<|im_end|>"]}'], tmp_path)
        ours = [
            json.loads(line) for line in (tmp_path / f"{name}.details").read_text().splitlines()
        ]
        assert len(ours) == len(theirs) == len(rows)
        for mine, row in zip(ours, theirs, strict=True):
            assert mine["score"] == row[metric], (mine, row)
            if name == "mc":
                found = [float(answer[0][0]) for answer in row["resps"]]
                assert mine["likelihoods"] == pytest.approx(found, abs=1e-3)
            else:
                assert mine["texts"][0].strip() == row["resps"][0][0].strip()
        agreed[name] = (sum(one["score"] for one in ours), len(ours))
    print("right, items:", agreed)


def _lm_eval_samples(folder: Path, name: str, url: str) -> list[dict[str, Any]]:
    """What lm-eval logged of each item, in the order of the items."""
    kind = "local-chat-completions" if "chat" in url else "local-completions"
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--tasks", name, "--log_samples"]
    command += ["--include_path", ".", "--output_path", f"lm-{name}", "--model_args"]
    command += [f"model={DEFAULT_MODEL},base_url={url},tokenizer={MODEL},num_concurrent=8"]
    run([*command, *(["--apply_chat_template"] if "chat" in url else [])], folder)
    (log,) = (folder / f"lm-{name}").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(samples, key=lambda one: int(one["doc_id"]))


def test_vercel_ai_sdk(client_url: str, tmp_path: Path) -> None:
    packages = os.environ.get("AI_SDK")
    if shutil.which("node") is None or packages is None:
        pytest.skip("AI_SDK names no folder with node_modules")
    (tmp_path / "node_modules").symlink_to(Path(packages) / "node_modules")
    shutil.copy(Path(__file__).with_name("ai_sdk.mjs"), tmp_path)
    assert "done" in run(["node", "ai_sdk.mjs", f"{client_url}/v1"], tmp_path)
