"""`radixlm bench VERB`. A verb's module is imported only when the verb is used."""

import sys
from collections.abc import Callable, Sequence

from radixlm.base.errors import CheckpointError, ConfigError, RequestError, TransferError
from radixlm.base.lazy import load
from radixlm.base.nearest import suggestion

# verb -> (module:function taking the remaining arguments, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "serve": ("radixlm.bench.serve:main", "latency and throughput of a running server"),
    "offline": ("radixlm.bench.offline:main", "throughput of the engine without a server"),
    "one-batch": ("radixlm.bench.one_batch:main", "prefill and decode speed of one static batch"),
    "sweep": ("radixlm.bench.sweep:main", "the highest request rate that meets an SLO"),
    "compare": ("radixlm.bench.compare:main", "two results side by side"),
    "one-batch-server": ("radixlm.bench.one_batch_server:main", "one batch through a server"),
    "long-context": ("radixlm.bench.long_context:main", "what prompts cost by their length"),
    "perplexity": ("radixlm.bench.perplexity:main", "how well models predict a text"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {verb:<16} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "usage: radixlm bench VERB [options]",
            "",
            *lines,
            "",
            "`radixlm bench VERB --help` lists a verb's options. For example:",
            "",
            "  radixlm bench serve --dataset-name random --num-prompts 64 --max-concurrency 16 \\",
            "      --random-input-len 256 --random-output-len 128 --plot latency.html",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The exit status of `radixlm bench`."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb = args[0].replace("_", "-")
    if verb not in VERBS:
        near = suggestion(verb, VERBS)
        print(f"radixlm bench: unknown verb {args[0]!r}{near}\n\n{usage()}", file=sys.stderr)
        return 2
    return run(f"radixlm bench {verb}", load(VERBS[verb][0]), args[1:])


def run(name: str, command: Callable[[Sequence[str]], int | None], args: Sequence[str]) -> int:
    """The exit status of a command: 1 if a measurement failed, 2 after a wrong option."""
    try:
        return int(command(args) or 0)
    except (ConfigError, CheckpointError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except (TransferError, RequestError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except SystemExit as leave:  # argparse has printed the help
        return int(leave.code or 0)


if __name__ == "__main__":
    sys.exit(main())
