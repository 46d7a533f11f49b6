"""Every `radixlm` command line of the documentation is one that the program reads."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Never

import pytest

from radixlm.base.lazy import load
from radixlm.bench.cli import VERBS as BENCHES
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.newer import newer_flags
from radixlm.config.option import options
from radixlm.config.parser import parse, parse_verb
from radixlm.entrypoints.cli import VERBS
from radixlm.entrypoints.completion import SHELLS, flags_of
from radixlm.router.options import table as gateway_table

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
)
SERVER_TOO = ("replay", "bench", "eval", "profile")  # their other words are options of a server
FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^ *```", re.M | re.S)
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
OTHERS = re.compile(
    r"(\$ )?(curl|docker|helm|kubectl|git|hf|pip|numactl|make|gate.py|vllm|ollama)\b"
)
# flags of other programs that our pages name
FOREIGN = set(
    "--json --data --no-deps --extra-index-url --user --rm --gpus --reservations "
    "--nofile --shm-size --interleave --ipc".split()
)


class Read(BaseException):
    """A command line was read; ``rest`` are words for the server."""

    def __init__(self, rest: list[str]) -> None:
        self.rest = rest


def commands(text: str) -> Iterator[str]:
    """Lines of code blocks that call radixlm, continued lines joined."""
    for block in FENCE.finditer(text):
        for line in block[2].replace("\\\n", " ").split("\n"):
            line = re.sub(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:exec )?", "", line)
            if line.startswith("radixlm "):
                yield line


def words_of(line: str) -> list[str]:
    """The words of one command without what the shell takes for itself."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            if words and words[-1].isdigit() and "2>" in line:
                words.pop()
            break
        words.append(word)
    pairs = pairwise(words)
    return [word for before, word in pairs if word != "..." or before.startswith("--")]


def read(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse as the program does, and stop there; ConfigError or SystemExit if it would refuse."""
    verb, rest = words[0].removeprefix("--"), words[1:]
    if {"-h", "--help", "--help-all", "--version"} & set(words):
        assert verb in (*VERBS, "help", "h")
    elif verb == "serve":
        parse(rest, takes_model=True)
    elif verb in ("chat", "generate"):
        parser = load(VERBS[verb][0].replace(":main", ":build_parser"))()
        parse_verb(parser, rest, takes_both=verb == "generate")
    elif verb == "run-batch":
        parse(load("radixlm.entrypoints.run_batch:_own")(rest)[2])
    elif verb == "router":
        module = "servers" if "--launch-servers" in rest else "options"
        load(f"radixlm.router.{module}:parse")(rest)
    elif verb == "completion":
        assert rest[0] in SHELLS
    elif verb in ("doctor", "check-env", "version"):
        assert set(rest) <= {"--json"}
    else:
        _read_until_parsed(verb, rest, monkeypatch)


def _read_until_parsed(verb: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def stop_known(self: Any, args: Any = None, namespace: Any = None) -> Never:
        raise Read(known(self, args, namespace)[1])

    def stop_whole(self: Any, args: Any = None, namespace: Any = None) -> Never:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", known)
            whole(self, args, namespace)
        raise Read([])

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop_whole)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_known)
        try:
            load(VERBS[verb][0])(argv)
        except Read as found:
            left = found.rest
        else:
            raise ValueError("refused")
    if left:
        assert verb in SERVER_TOO, left
        parse(left)


@cache
def known_flags() -> frozenset[str]:
    """Flags of the server, the gateway and all verbs."""
    server = {name for one in options().values() for name in (one.dashed, *one.flag.aliases)}
    gateway = {name for o in gateway_table().values() for name in (o.dashed, *o.flag.aliases)}
    named = {f"--router-{name.removeprefix('--')}" for name in gateway}
    verbs = {flag for verb, (target, _) in VERBS.items() for flag in flags_of(verb, target)}
    for target, _ in BENCHES.values():
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            load(target)(["--help"])
        verbs |= set(FLAG.findall(out.getvalue()))
    newer = {"--" + name.replace("_", "-") for name in newer_flags()}
    renamed = {"--" + name.replace("_", "-") for name in DEPRECATED}
    negated = {"--no-" + name.removeprefix("--") for name in server | gateway}
    scripts = [
        *(ROOT / "bench").rglob("*.py"),
        *(ROOT / "zoo").rglob("*.py"),
        *(p for p in (ROOT / "scripts").iterdir() if p.is_file()),
    ]
    own = {flag for path in scripts for flag in FLAG.findall(path.read_text(encoding="utf-8"))}
    ours = server | gateway | named | verbs | newer | renamed | negated
    return frozenset(ours | own | FOREIGN)


def flags_named(text: str) -> Iterator[str]:
    """Flags in inline code. First columns of tables headed by another engine's name are theirs."""
    is_foreign = False
    for line in FENCE.sub("", text).split("\n"):
        if not line.startswith("|"):
            is_foreign = False
        elif re.match(r"\| (vLLM|Ollama|SGLang|llama\.cpp) ", line):
            is_foreign = True
        for code in re.findall(r"`([^`]+)`", line.split("|", 2)[2] if is_foreign else line):
            if not OTHERS.match(code):
                yield from re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*<-])", code)


def test_the_check_sees_wrong_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "```sh\n$ A=1 radixlm top \\\n  --onse 2>&1 | cat  # x\n```\n"
    (line,) = commands(text)
    assert words_of(line) == ["top", "--onse"]
    for wrong in ("serve --modell x", "top --onse", "bench serve --nothing 3", "router --polici x"):
        with pytest.raises((Exception, SystemExit)), contextlib.redirect_stderr(io.StringIO()):
            read(words_of(f"radixlm {wrong}"), monkeypatch)
    assert list(flags_named("a `--one-flag x` and `curl --json`")) == ["--one-flag"]
    assert list(flags_named("| vLLM | here |\n| `--max-model-len` | `--context-length` |")) == [
        "--context-length"
    ]


def test_routes_of_the_guides_exist() -> None:
    """Those that a line calls missing do not."""
    told = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    routes = set(re.findall(r"^\| `[A-Z]+ (/\S*)` \| (?:open|admin|) \|", told, re.M)) | {
        "/metrics"
    }
    num_missing = 0
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        text = re.sub(
            r"(?<!\n)\n(?!\n|[-|#*])", " ", FENCE.sub("", page.read_text(encoding="utf-8"))
        )
        for sentence in re.split(r"[.;](?= |\n)|\n", text):
            is_missing = re.search(r"not exist|There is no", sentence)
            own = sentence.partition("vLLM's `/classify` is")[2] or sentence
            found = re.findall(r"`(?:GET |POST )?(/[\w/]+)`", own)
            for route in found:
                assert (route in routes) != bool(is_missing), f"{page.name}: {route}"
                num_missing += bool(is_missing)
    assert num_missing >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse_and_flags_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    for line in commands(text):
        try:
            read(words_of(line), monkeypatch)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{line}: {error!r}")
    if page.parent.name == "adding":
        return  # walk-throughs name flags that they add
    wrong = sorted(set(flags_named(text)) - known_flags())
    assert not wrong, f"no flag {', '.join(wrong)}"
