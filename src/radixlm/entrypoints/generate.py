"""``radixlm generate``: prompts from arguments or standard input, answers on standard output."""

import json
import sys

from radixlm.base.errors import ConfigError, RequestError
from radixlm.base.log import set_up_logging
from radixlm.config.parser import parse
from radixlm.config.server_config import flat
from radixlm.entrypoints.offline import Engine

USAGE = """usage: radixlm generate [--prompt TEXT ...] [--max-new-tokens N] [--temperature T]
                        [--json] [server options]

Prompts are the --prompt values, or else the lines of standard input. Answers stream to standard
output; --json prints one JSON object a prompt instead. Server options: radixlm serve --help."""

FLAGS = ("--prompt", "--max-new-tokens", "--temperature", "--json")


def _split_options(argv: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(options of this verb with their values, the server's options)."""
    values: dict[str, list[str]] = {}
    rest: list[str] = []
    args = iter(argv)
    for arg in args:
        name, _, value = arg.partition("=")
        if name in FLAGS[:3]:
            value = value if "=" in arg else next(args, "")
            values.setdefault(name, []).append(value)
        elif name == "--json":
            values["--json"] = [""]
        else:
            rest.append(arg)
    return values, rest


def _number(values: dict[str, list[str]], name: str, default: float) -> float:
    try:
        return float(values[name][-1]) if name in values else default
    except ValueError:
        raise ConfigError(f"{name} {values[name][-1]!r} is not a number; try {default:g}") from None


def main(argv: list[str]) -> int:
    """Answer the prompts in order."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    values, rest = _split_options(argv)
    prompts = values.get("--prompt") or [line.rstrip("\n") for line in sys.stdin]
    params = {
        "max_new_tokens": int(_number(values, "--max-new-tokens", 128)),
        "temperature": _number(values, "--temperature", 0.0),
    }
    config, given = parse(rest, "radixlm generate", FLAGS)
    set_up_logging("generate", config.observe.log_level if "log_level" in given else "warning")
    options = {
        name: value for name, value in flat(config, show_secrets=True).items() if name in given
    }
    try:
        with Engine(**options) as engine:
            for prompt in prompts:
                _answer(engine, prompt, params, "--json" in values)
    except RequestError as error:
        print(f"radixlm generate: {error}", file=sys.stderr)
        return 2
    return 0


def _answer(engine: Engine, prompt: str, params: dict[str, float], is_json: bool) -> None:
    if is_json:
        print(json.dumps(engine.generate(prompt, params), ensure_ascii=False), flush=True)
        return
    shown = 0
    for event in engine.generate(prompt, params, stream=True):
        print(event["text"][shown:], end="", flush=True)
        shown = len(event["text"])
    print()
