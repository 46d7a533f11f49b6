"""The command ``radixlm``; a verb's module is imported when it is called."""

import os
import sys
import threading

from radixlm import __version__
from radixlm.base.errors import CheckpointError, ConfigError, TransferError
from radixlm.base.lazy import load
from radixlm.base.nearest import suggestion

# verb -> ("module:function" that takes the remaining arguments, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "serve": ("radixlm.entrypoints.serve:main", "start the HTTP server"),
    "chat": ("radixlm.terminal.cli:main", "talk to a model in the terminal"),
    "top": ("radixlm.terminal.top:main", "watch running servers in the terminal"),
    "generate": ("radixlm.entrypoints.generate:main", "answer prompts without a server"),
    "run-batch": ("radixlm.entrypoints.run_batch:main", "answer a file of OpenAI batch requests"),
    "replay": ("radixlm.entrypoints.replay:main", "send the requests of a crash dump again"),
    "compare-dumps": (
        "radixlm.engine.compare_dumps:main",
        "find the first tensor in which two runs differ",
    ),
    "profile": ("radixlm.entrypoints.profile:main", "trace steps of a running server"),
    "bench": ("radixlm.bench.cli:main", "measure: serve, sweep, compare, offline, one-batch"),
    "eval": ("radixlm.evals.cli:main", "measure how right a model's answers are"),
    "router": ("radixlm.router.launch:main", "put a gateway in front of many servers"),
    "pull": ("radixlm.entrypoints.models:pull", "download a model from a hub"),
    "models": ("radixlm.entrypoints.models:main", "show the models that are on this machine"),
    "lora": ("radixlm.entrypoints.lora:main", "inspect a LoRA adapter"),
    "quantize": ("radixlm.quantize.cli:main", "write a checkpoint in fewer bits"),
    "calibrate": (
        "radixlm.quantize.heavy_channels:main",
        "find the heavy channels of a model's attention",
    ),
    "doctor": ("radixlm.entrypoints.doctor:main", "say what would run how fast here, and why"),
    "check-env": ("radixlm.entrypoints.check_env:main", "show what this machine offers"),
    "completion": ("radixlm.entrypoints.completion:main", "complete words in bash, zsh or fish"),
    "version": ("radixlm.entrypoints.cli:version", "print the version"),
}

ELSEWHERE = {
    "run": "chat",
    "list": "models",
    "ls": "models",
    "ps": "top --once",
    "rm": "models rm",
    "complete": "generate",
    "launch_server": "serve",
    "launch_router": "router",
    "bench_serving": "bench serve",
}
"""What verbs of Ollama, vLLM and SGLang are here."""


def version(argv: list[str]) -> int:
    """Print the version."""
    if argv in (["-h"], ["--help"]):
        print("usage: radixlm version")
        return 0
    if argv:
        raise ConfigError(f"version takes no {argv[0]!r}")
    print(__version__)
    return 0


def usage() -> str:
    """The help text."""
    lines = [f"  {verb:<13} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            f"RadixLM {__version__}: serve language models.",
            "",
            "usage: radixlm VERB [options]",
            "",
            *lines,
            "",
            "`radixlm VERB --help` lists a verb's options. Without a model, serve and chat use the",
            "small one that comes with the package.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit status is 2 for an error of the user."""
    args = sys.argv[1:] if argv is None else argv
    _open_standard_files()
    try:
        try:
            return _run(args)
        finally:
            sys.stdout.flush()
    except (ConfigError, CheckpointError, TransferError) as error:
        print(f"radixlm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if argv is None and any(one.name == "engine" for one in threading.enumerate()):
            os._exit(130)  # it may load a model: the end of the program would wait for it
        return 130
    except BrokenPipeError:
        _drop_output()
        return 130
    except OSError as error:  # a full disk, a folder that cannot be written
        _drop_output()
        print(f"radixlm: {error}", file=sys.stderr)
        return 2


def _run(args: list[str]) -> int:
    if args[:1] == ["help"] and len(args) == 2:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb = "version" if args[0] in ("--version", "-V") else args[0]
    if verb not in VERBS:
        here = ELSEWHERE.get(verb.replace("-", "_"))
        near = f"; here it is `radixlm {here}`" if here else suggestion(verb, VERBS)
        more = "" if near else f"\n\n{usage()}"
        print(f"radixlm: unknown verb {verb!r}{near}{more}", file=sys.stderr)
        return 2
    return int(load(VERBS[verb][0])(args[1:]) or 0)


def _open_standard_files() -> None:
    """/dev/null for those that were closed (``<&-``): else a socket would get their number. The
    processes that this one starts have them too."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = open(os.devnull, mode)
            os.set_inheritable(opened.fileno(), opened.fileno() == number)
            setattr(sys, name, opened)


def _drop_output() -> None:
    """Python flushes what standard output still holds when it ends, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
