"""`radixlm eval` against a server that answers by a rule."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from radixlm.base.errors import ConfigError, TransferError
from radixlm.evals.cli import main
from radixlm.evals.items import Grade, Item, Reply
from radixlm.evals.run import Answered, pass_at, summarise

Rule = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


class Served:
    """A server whose answers `rule` gives for path and body; `bodies` are those it got."""

    def __init__(self, rule: Rule) -> None:
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                outer.bodies.append(body)
                models = {"data": [{"id": "m"}]}
                status, made = (200, models) if "models" in self.path else rule(self.path, body)
                data = json.dumps(made).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # a full queue makes a client wait for seconds

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()


@pytest.fixture
def serve() -> Iterator[Callable[[Rule], Served]]:
    made: list[Served] = []

    def start(rule: Rule) -> Served:
        made.append(Served(rule))
        return made[-1]

    yield start
    for one in made:
        one.server.shutdown()
        one.server.server_close()
        one.thread.join(10)


def said(text: str) -> tuple[int, dict[str, Any]]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return 200, {"choices": [{"message": {"content": text}, "text": text}], "usage": usage}


def solver(is_wrong: Callable[[int], bool]) -> Rule:
    """Adds the two numbers of a question; wrong where the first one says so."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert path == "/v1/completions" and body["stop"] and body["model"] == "m"
        a, b = body["prompt"].rpartition("Question: ")[2].partition("\n")[0].split("+")
        return said(f" {int(a) + int(b) + is_wrong(int(a))}")

    return answer


def sums(path: Path, count: int) -> str:
    rows = [{"question": f"{i}+1", "answer": f"#### {i + 1}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


Serve = Callable[[Rule], Served]


def test_prints_as_the_reference_does(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(solver(lambda a: a % 4 == 0))
    path = sums(tmp_path / "s.jsonl", 25)
    assert main(["gsm8k", "--data-path", path, "--url", served.url]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["Accuracy: 0.750", "Invalid: 0.000"]
    assert out[3].startswith("Latency: ") and out[4].startswith("Output throughput: ")
    assert out[5] == "95% interval: 0.531 to 0.888 (Wilson, 20 items)"
    assert served.bodies[-1]["temperature"] == 0.0 and "seed" not in served.bodies[-1]


def test_against_says_if_a_difference_is_real(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = serve(solver(lambda _: False)), serve(solver(lambda a: a % 2 == 0))
    path, kept = sums(tmp_path / "s.jsonl", 45), str(tmp_path / "kept.jsonl")
    args = ["gsm8k", "--data-path", path, "--num-shots", "1", "--json", "--url"]
    assert main([*args, good.url, "--against", bad.url, "--details", kept]) == 0
    text = capsys.readouterr().out
    first, second = (json.loads(part) for part in text.replace("}\n{", "}\0{").split("\0"))
    assert first["accuracy"] == 1.0 and second["accuracy"] == 0.5
    assert first["against"]["is_real"] and first["against"]["only_first"] == 22
    assert main([*args, bad.url, "--against", kept]) == 0
    assert json.loads(capsys.readouterr().out)["against"]["only_second"] == 22
    assert main([*args, good.url, "--against", kept]) == 0
    assert not json.loads(capsys.readouterr().out)["against"]["is_real"]


def test_refused_requests_are_sent_again_and_lost_ones_count(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: set[str] = set()

    def busy(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["prompt"] not in seen:
            seen.add(body["prompt"])
            return 503, {"error": {"message": "busy"}}
        if "3+1" in body["prompt"]:
            return 400, {"error": {"message": "not this one"}}
        return solver(lambda _: False)(path, body)

    served, path = serve(busy), sums(tmp_path / "s.jsonl", 5)
    args = ["gsm8k", "--data-path", path, "--num-shots", "0", "--url", served.url, "--json"]
    assert main([*args, "--output-file", str(tmp_path / "out.jsonl")]) == 1
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["errors"] == 1 and result["accuracy"] == 0.8 and result["invalid"] == 0.2
    assert "a request failed: status 400: not this one" in captured.err
    assert json.loads((tmp_path / "out.jsonl").read_text())["total_output_tokens"] == 12


def test_likelihoods_count_the_tokens_of_the_choice(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def echo(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["echo"] and body["logprobs"] == 1 and body["max_tokens"] == 1
        text = body["prompt"] + "!"
        found = {
            "text_offset": list(range(len(text))),
            "token_logprobs": [None, *(-float(ord(c)) for c in text[1:])],
        }
        return 200, {"choices": [{"text": text, "logprobs": found}]}

    rows = [{"context": "zz", "choices": ["b", "a", "aa"], "answer": i} for i in (1, 0)]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = tmp_path / "kept.jsonl"
    args = ["choices", "--data-path", str(path), "--url", serve(echo).url, "--json"]
    assert main([*args, "--details", str(kept)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == 0.5 and result["acc_norm"] == 0.5
    assert json.loads(kept.read_text().splitlines()[0])["likelihoods"] == [-98.0, -97.0, -194.0]


def test_samples_give_pass_at_k(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lucky(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return solver(lambda _: body["seed"] != 12)(path, body)

    served, path = serve(lucky), sums(tmp_path / "s.jsonl", 4)
    args = ["gsm8k", "--data-path", path, "--num-shots", "0", "--url", served.url, "--json"]
    args += ["--num-samples", "4", "--temperature", "0.8", "--seed", "10"]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == result["pass@1"] == 0.25 and result["pass@2"] == 0.5
    assert result["interval"] == "bootstrap"


def test_pass_at_counts_draws() -> None:
    grades = tuple(Grade(float(i < 3)) for i in range(10))
    one = Answered(Item("0", "", ""), (Reply(),) * 10, grades)
    assert pass_at([one])["pass@5"] == pytest.approx(1 - 21 / 252)  # 7 choose 5, 10 choose 5
    assert pass_at([Answered(Item("0", "", ""), (Reply(),), grades[:1])]) == {}
    groups = [
        Answered(Item(str(i), "", "", "ab"[i % 2]), (Reply(),), grades[i : i + 1]) for i in range(4)
    ]
    found = summarise(groups, 1.0, 0)["groups"]
    assert found["a"]["accuracy"] == 1.0 and found["b"]["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gsm9k"], "did you mean"),
        (["needle", "--num-samples", "3"], "--temperature 0.8"),
        (["needle", "--url", "http://x", "--tp-size", "2"], "unrecognized arguments: --tp-size"),
        (["needle", "--url", "x"], "expected http://"),
        (["needle", "--eval-name", "mmlu"], "two tasks"),
        (["needle", "--limit", "0"], "--limit 0: at least 1"),
        (["humaneval"], "--allow-code-execution"),
        (["needle", "--lengths", "3"], "20 words"),
        (["needle", "--skip-tokenizer-init"], "needs the tokenizer"),
        (["needle", "--model", "./not-there"], "not-there"),
        (["--cpu-threads", "1", "--model-path", "./not-there"], "not-there"),
        (["--api", "chat", "gsm8k"], "gsm8k needs --data-path"),
        (["needle", "--api", "completions", "--system-prompt", "x"], "add --api chat"),
        (["--repeat", "3"], "--num-samples: equal answers at --temperature 0"),
        (["--thinking-mode", "qwen3"], "--thinking-mode is not served: give what"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(args)


def test_what_cannot_be_reached_or_written_is_told_before_the_run(
    tmp_path: Path, serve: Serve
) -> None:
    served = serve(lambda path, body: (200, {}))
    path = tmp_path / "items.jsonl"
    path.write_text('{"question": "a", "answer": "b"}')
    args = ["exact", "--data-path", str(path), "--url"]
    nobody = "http://127.0.0.1:1"
    for words in ([nobody], [nobody, "--model", "m"], [served.url, "--against", nobody]):
        with pytest.raises(TransferError, match="no server answers at"):
            main([*args, *words])
    with pytest.raises(ConfigError, match="cannot read"):
        main([*args, served.url, "--against", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="--details: cannot write"):
        main([*args, served.url, "--details", str(tmp_path / "none" / "x")])
    assert not any("messages" in body for body in served.bodies)
