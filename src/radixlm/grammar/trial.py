"""Tries grammars in a process with limits on time and memory, before they are compiled here.

A library cannot be interrupted: what it cannot stop, this process stops. It knows only bytes and
the special tokens, so it needs no tokenizer; a grammar costs nearly the same with all tokens.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.base.errors import InvalidRequest, Overloaded
from radixlm.base.lazy import load
from radixlm.base.record import Record
from radixlm.grammar.spec import GrammarOptions, GrammarSpec, refuse
from radixlm.text.tokenizer import Tokenizer

MAX_MEMORY_BYTES = 1 << 30
_START_S = 120.0  # xgrammar imports torch
_WALL_PER_CPU = 3  # other work may slow the process
_NICE = 10
_MAIN = "from radixlm.grammar.trial import main; main()"


class TrialSetup(Record):
    """What the process must know: the backend, its options, the special tokens as text."""

    backend: str
    whitespace_pattern: str | None
    disable_any_whitespace: bool
    special: tuple[str, ...]

    @classmethod
    def of(cls, backend: str, tokenizer: Tokenizer, options: GrammarOptions | None) -> TrialSetup:
        """The setup for a server's tokenizer and options."""
        options = options or GrammarOptions()
        texts = (tokenizer.id_to_piece(i) for i in sorted(tokenizer.special_ids))
        pattern, is_compact = options.whitespace_pattern, options.disable_any_whitespace
        return cls(backend, pattern, is_compact, tuple(t for t in texts if t))


class TooSlow(Exception):
    """The grammar needs more time than it was given."""


class Trial:
    """One process, started when needed, and again after it was stopped. For one thread."""

    def __init__(self, setup: TrialSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of ``close`` against a start

    def run(self, spec: GrammarSpec, cpu_s: float) -> None:
        """Compile ``spec``, whether it is valid or not. TooSlow after ``cpu_s`` seconds of a CPU,
        InvalidRequest if it takes too much memory, Overloaded if no process can be started."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        line = json.dumps([spec.kind, spec.text, spec.is_strict, cpu_s]).encode() + b"\n"
        if _ask(process, line, cpu_s * _WALL_PER_CPU):
            return
        is_slow = process.poll() in (None, -signal.SIGPROF)
        self.close()
        if is_slow:
            raise TooSlow
        limit = f"more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
        raise refuse(spec.kind, f"compiling takes {limit}; simplify it")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
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
            )
        except OSError as error:  # no descriptor, process or memory is left
            raise _busy(str(error)) from None
        with self._lock:
            self._process = process
        setup = self._setup
        fields = [*(getattr(setup, name) for name in setup.__annotations__)]
        if not _ask(process, json.dumps(fields).encode() + b"\n", _START_S):
            self.close()
            raise _busy("the process that tries grammars did not start")
        return process


def _busy(reason: str) -> Overloaded:
    return Overloaded(f"no grammar can be compiled now: {reason}", retry_after_s=10)


def _ask(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bool:
    """Whether the process answers the line in time."""
    assert process.stdin is not None and process.stdout is not None
    try:
        view = memoryview(line)
        while view:
            view = view[process.stdin.write(view) :]
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(timeout_s * 1000):
            return False
        if process.stdout.read(1):
            return True
    except BrokenPipeError:
        pass
    process.wait()  # it has closed its end
    return False


class ByteTokenizer:
    """Stands for the Tokenizer of a server: the bytes, and its special tokens."""

    bos_id = None

    def __init__(self, special: Sequence[str]) -> None:
        self._special = list(special)
        self.vocab_size = 256 + len(special)
        self.special_ids = frozenset(range(256, self.vocab_size))

    def token_bytes(self, token: int) -> bytes:
        """See Tokenizer."""
        return bytes([token]) if token < 256 else self._special[token - 256].encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See Tokenizer."""
        return list(text.encode())

    def is_special(self, token: int) -> bool:
        """See Tokenizer."""
        return token >= 256

    def id_to_piece(self, token: int) -> str | None:
        """See Tokenizer."""
        return self._special[token - 256] if token >= 256 else None


def main() -> None:
    """The process: one line with the setup, then one for each grammar; a byte answers each."""
    name, pattern, is_compact, special = json.loads(sys.stdin.readline())
    tokenizer: Any = ByteTokenizer(special)
    options = GrammarOptions(whitespace_pattern=pattern, disable_any_whitespace=is_compact)
    create = load("radixlm.grammar.compile:create_backend")
    backend = create(name, tokenizer, (), tokenizer.vocab_size, options)
    for first in (GrammarSpec("regex", "a"), GrammarSpec("json_object")):
        backend.compile(first)  # imports what the first grammar needs
    _limit_memory()
    while True:
        sys.stdout.write(".")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        kind, text, is_strict, cpu_s = json.loads(line)
        if cpu_s > 1:
            os.nice(_NICE)  # what takes long gives way to the model
        # the kernel ends the process after so much work, even if nobody waits for it
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        spec: Any = GrammarSpec(kind, text, is_strict)
        try:
            backend.compile(spec).matcher()
        except InvalidRequest:
            pass  # the server finds the same, in words for its own tokens
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = used + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
