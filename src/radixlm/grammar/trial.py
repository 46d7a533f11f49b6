"""Tries grammars in processes with limits on time and memory, before they are compiled here.

A library cannot be interrupted: what it cannot stop, the kernel stops. A process that has the
library loaded forks one for each grammar, so that none waits for a start after another was stopped.
It knows only bytes and the special tokens, so it needs no tokenizer; a grammar costs nearly the
same with all tokens.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.grammar.spec import GrammarBackend, GrammarOptions, GrammarSpec, Kind, refuse
from radixlm.text.tokenizer import Tokenizer

MAX_MEMORY_BYTES = 1 << 30
_START_S = 120.0  # xgrammar imports torch
_WALL_PER_CPU = 3  # other work may slow the process
_NICE = 10
_MARGIN_S = 5.0  # a busy machine may let a process wait so long
_MAIN = "from radixlm.grammar.trial import main; main()"
# what the process answers
_READY, _FITS, _INVALID, _TOO_SLOW, _TOO_LARGE, _NO_PROCESS = b".", b"f", b"i", b"t", b"m", b"p"
_EXITS = {0: _FITS, 2: b"", -signal.SIGPROF: _TOO_SLOW, -signal.SIGALRM: _TOO_SLOW}
_MAX_ERROR = 4096  # characters: less than a pipe holds


class TrialSetup(Record):
    """What the process must know: the backend, its options, the special tokens as text."""

    backend: str
    whitespace_pattern: str | None
    disable_any_whitespace: bool
    special: tuple[str, ...]
    max_whitespace: int | None = None

    @classmethod
    def of(cls, backend: str, tokenizer: Tokenizer, options: GrammarOptions | None) -> TrialSetup:
        """The setup for a server's tokenizer and options."""
        options = options or GrammarOptions()
        texts = (tokenizer.id_to_piece(i) for i in sorted(tokenizer.special_ids))
        pattern, is_compact = options.whitespace_pattern, options.disable_any_whitespace
        special = tuple(text for text in texts if text)
        return cls(backend, pattern, is_compact, special, options.max_whitespace)


class TooSlow(Exception):
    """The grammar needs more time than it was given."""


class Trial:
    """One process, started when needed, and again if it ends. For one thread."""

    def __init__(self, setup: TrialSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of ``close`` against a start

    def run(self, spec: GrammarSpec, cpu_s: float) -> None:
        """Compile ``spec``. TooSlow after ``cpu_s`` seconds of a CPU, InvalidRequest for an invalid
        grammar or too much memory, Overloaded if no process can be started."""
        line = json.dumps([spec.kind, spec.text, spec.is_strict, cpu_s]).encode() + b"\n"
        answer = b""
        for _ in range(2):  # the process may have been killed
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            answer = _ask(process, line, cpu_s * _WALL_PER_CPU + 2 * _MARGIN_S)
            if answer:
                break
            self.close()
        if answer == _TOO_SLOW:
            raise TooSlow
        if answer[:1] == _INVALID:
            raise InvalidRequest(*json.loads(answer[1:]))
        if answer == _TOO_LARGE:
            limit = f"more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
            raise refuse(spec.kind, f"compiling takes {limit}; simplify it")
        if answer != _FITS:
            raise _busy("the process that tries grammars ended")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it and what it has forked
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:  # no descriptor, process or memory is left
            raise _busy(str(error)) from None
        with self._lock:
            self._process = process
        setup = self._setup
        fields = [*(getattr(setup, name) for name in setup.__annotations__)]
        if _ask(process, json.dumps(fields).encode() + b"\n", _START_S) != _READY:
            self.close()
            raise _busy("the process that tries grammars did not start")
        return process


def _busy(reason: str) -> Overloaded:
    return Overloaded(f"no grammar can be compiled now: {reason}", retry_after_s=10)


def _ask(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    """What the process answers; nothing if it has ended or takes longer."""
    assert process.stdin is not None and process.stdout is not None
    try:
        view = memoryview(line)
        while view:
            view = view[process.stdin.write(view) :]
    except BrokenPipeError:
        return b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN | select.POLLHUP)
    # one after the other: this process, and the other with it, may stand still for longer
    if not any(poll.poll(1000) for _ in range(math.ceil(timeout_s))):
        return b""
    answer = process.stdout.read(1) or b""
    if answer == _INVALID:
        answer += process.stdout.readline()
        return answer if answer.endswith(b"\n") else b""  # it was killed meanwhile
    return answer


class ByteTokenizer:
    """Stands for the Tokenizer of a server: the bytes, and its special tokens."""

    bos_id = None

    def __init__(self, special: Sequence[str]) -> None:
        self._special = list(special)
        self.vocab_size = 256 + len(special)
        self.special_ids = frozenset(range(256, self.vocab_size))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self._special[token - 256].encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def is_special(self, token: int) -> bool:
        return token >= 256

    def id_to_piece(self, token: int) -> str | None:
        return self._special[token - 256] if token >= 256 else None


def main() -> None:
    """The process: one line with the setup, then one for each grammar; a byte answers each."""
    name, pattern, is_compact, special, most = json.loads(sys.stdin.readline())
    tokenizer: Any = ByteTokenizer(special)
    options = GrammarOptions(pattern, is_compact, most)
    create = load("radixlm.grammar.compile:create_backend")
    backend = create(name, tokenizer, (), tokenizer.vocab_size, options)
    for first in (GrammarSpec("regex", "a"), GrammarSpec("json_object")):
        backend.compile(first)  # imports what the first grammar needs
    _limit_memory()
    gc.freeze()
    answer = _READY
    while True:
        sys.stdout.buffer.write(answer)
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        answer = _answer(backend, *json.loads(line))


def _answer(backend: GrammarBackend, kind: Kind, text: str, is_strict: bool, cpu_s: float) -> bytes:
    """Compile a grammar in a process of its own."""
    try:
        pid = os.fork()
    except OSError:
        return _NO_PROCESS
    if not pid:
        if cpu_s > 1:
            os.nice(_NICE)  # what takes long gives way to the model
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, cpu_s * _WALL_PER_CPU + _MARGIN_S)
        _compile(backend, GrammarSpec(kind, text, is_strict))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _EXITS.get(code, _TOO_LARGE)


def _compile(backend: GrammarBackend, spec: GrammarSpec) -> NoReturn:
    code = 1
    try:
        backend.compile(spec).matcher()
        code = 0
    except InvalidRequest as error:
        code = 0
        if "<[" not in spec.text:  # token ids, which are others here
            error_line = json.dumps([error.message[:_MAX_ERROR], error.param])
            os.write(1, _INVALID + error_line.encode() + b"\n")
            code = 2
    except Exception as error:  # the server finds the same
        code = isinstance(error, MemoryError)
    finally:
        os._exit(code)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = used + MAX_MEMORY_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # of ulimit -v: nobody may raise it
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
