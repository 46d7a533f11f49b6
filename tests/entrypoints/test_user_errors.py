"""Mistakes on the command line: one line that names the flag or file and what works."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

import radixlm
from radixlm.base.errors import CheckpointError, ConfigError, reason
from radixlm.entrypoints import cli
from radixlm.evals.cli import build_parser as eval_parser
from radixlm.terminal import cli as chat
from radixlm.text.tokenizer import load_tokenizer

CASES = [
    (["top", "--onc"], "--onc; did you mean '--once'?"),
    (["top", "--interval", "x"], "--interval: 'x' is not a number; a value that works: 1.0"),
    (["pull", "org/x", "--revison", "3"], "did you mean '--revision'?"),
    (["quantize", "m", "-o", "f", "--calibration-tokens", "x"], "'x' is not an integer"),
    (["lora", "inspect"], "PATH"),
    (["chat", "hi", "--temperature", "hot"], "--temperature: 'hot' is not a number"),
    (["chat", "hi", "--url", "http://127.0.0.1:1", "--image", "none.png"], "127.0.0.1:1"),
    (["compare-dumps", "FILE", "FILE"], "FILE is no dump"),
    (["run-batch", "EMPTY", "-o", "out"], "EMPTY: the file must hold"),
    (["serve", "--api-key", ""], "--api-key is empty"),
    (["serve", "--served-model-name", ""], "--served-model-name is empty"),
    (["serve", "--cpu-threads", "9999"], "--cpu-threads: '9999' is not in [1, 1024]"),
    (["serve", "--trust-remote-code=maybe"], "takes no value, got 'maybe'"),
    (["serve", "--config", "none.yaml"], "--config: cannot read none.yaml: No such file"),
    (["serve", "/no/model"], "'/no/model': there is no such file or folder"),
    (["serve", "./LINK"], "'./LINK' is a link to nowhere, which does not exist"),
    (["serve", "MODEL/weights.safetensors"], "is a file of a model: give its folder, MODEL"),
    (["serve", "--ssl-certfile", "FILE", "--ssl-keyfile", "k"], "--ssl-keyfile k: there is no"),
    (["serve", "--max-model-len", "4096"], "vLLM's; here it is --context-length"),
    (["serve", "--config", "vllm.yaml"], "max-num-seqs is vLLM's; here it is --max-running"),
    (["router", "--api-key", ""], "--api-key is empty"),
    (["router", "--launch-servers", "1", "--router-polcy", "x"], "'--router-policy'"),
]


@pytest.mark.parametrize(("argv", "says"), CASES, ids=[" ".join(argv)[:40] for argv, _ in CASES])
def test_a_mistake_is_one_line(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("no tensors")
    Path("EMPTY").touch()
    Path("LINK").symlink_to("nowhere")
    Path("MODEL").mkdir()
    Path("MODEL/config.json").write_text("{}")
    Path("MODEL/weights.safetensors").touch()
    Path("vllm.yaml").write_bytes(b"port: 1\r\nmax-num-seqs: 8\r\n")
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(("verb", "here"), [("run", "chat"), ("launch-server", "serve")])
def test_verbs_of_other_engines(verb: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"radixlm: unknown verb {verb!r}; here it is `radixlm {here}`\n")
    assert "usage" not in said and set(cli.ELSEWHERE).isdisjoint(cli.VERBS)
    assert {to.split()[0] for to in cli.ELSEWHERE.values()} <= {*cli.VERBS}


def test_a_missing_image_is_named_by_its_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chat, "_server", lambda *_: _Nothing())
    with pytest.raises(ConfigError, match=r"^--image \S+none.png: No such file or directory$"):
        chat.main(["hi", "--image", str(tmp_path / "none.png")])


class _Nothing:
    """A server that is never asked."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    shutil.copy(Path(radixlm.__file__).parent / "assets/radix-tiny/config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer is in .*--tokenizer-path"):
        load_tokenizer(tmp_path)


def test_tasks_of_eval_are_listed_a_line_each() -> None:
    lines = eval_parser().format_help().splitlines()
    assert "  gsm8k             grade-school mathematics, few-shot" in lines
    assert any("--lengths" in line and "(default: 500 1000 2000)" in line for line in lines)


def test_the_reason_of_an_error_has_no_number() -> None:
    assert reason(FileNotFoundError(2, "No such file", "x")) == "No such file"
    assert reason(ValueError("wrong")) == "wrong"
    assert reason(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize("verb", ["doctor", "top", "completion", "run-batch", "lora"])
def test_help_is_for_a_terminal(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert f"radixlm {verb}" in shown and "``" not in shown
