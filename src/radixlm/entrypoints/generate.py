"""``radixlm generate 'prompt' ...``: answers on standard output, without a server.

Without prompts the lines of standard input are read. A model with a chat template answers the
prompt as a user's message; --raw continues the text itself.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from radixlm.base.errors import ConfigError, RequestError
from radixlm.base.log import set_up_logging
from radixlm.config.parser import parse_verb
from radixlm.config.server_config import flat
from radixlm.config.verb_parser import TableHelp, VerbParser
from radixlm.entrypoints.offline import Engine
from radixlm.text.chat import load_chat_template


def build_parser() -> VerbParser:
    """The options of this verb; others are the server's."""
    parser = VerbParser(
        "radixlm generate", __doc__,
        usage="radixlm generate [PROMPT ...] [options] [server options]",
        formatter_class=TableHelp,
        epilog="Server options, such as --model-path FOLDER: radixlm serve --help.",
    )  # fmt: skip
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="longest answer"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--json", action="store_true", help="an object of JSON for each prompt")
    return parser


def main(argv: list[str]) -> int:
    """Answer the prompts in order; 2 for a prompt that is refused."""
    args, words, _, config, given = parse_verb(build_parser(), argv, takes_both=True)
    prompts = [*args.prompt, *words]
    level = config.observe.log_level if "log_level" in given else "warning"
    set_up_logging("generate", level, log_format=config.observe.log_format)
    options = {n: value for n, value in flat(config, show_secrets=True).items() if n in given}
    params = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    try:
        with Engine(**options) as engine:
            prompt_of = _prompt_of(engine, config.serve.chat_template, args.raw, params)
            for prompt in prompts or (line.rstrip("\n") for line in sys.stdin):
                _answer(engine, prompt_of(prompt), params, args.json)
    except RequestError as error:
        print(f"radixlm generate: {error}", file=sys.stderr)
        return 2
    return 0


def _prompt_of(
    engine: Engine, template: str | None, is_raw: bool, params: dict[str, Any]
) -> Callable[[str], dict[str, Any]]:
    """What makes the fields of ``/generate`` of a prompt."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("--skip-tokenizer-init: generate needs the tokenizer")
    if is_raw or (template is None and tokenizer.chat_template() is None):
        return lambda prompt: {"prompt": prompt}
    chat = load_chat_template(tokenizer, template)
    params["stop"] = list(chat.stops)

    def fields(prompt: str) -> dict[str, Any]:
        text = chat.render([{"role": "user", "content": prompt}], template_kwargs={})
        return {"input_ids": tokenizer.encode(text, chat.adds_special_tokens)}

    return fields


def _answer(engine: Engine, fields: dict[str, Any], params: dict[str, Any], is_json: bool) -> None:
    if is_json:
        answer = engine.generate(sampling_params=params, **fields)
        print(json.dumps(answer, ensure_ascii=False), flush=True)
        return
    shown = 0
    for event in engine.generate(sampling_params=params, stream=True, **fields):
        print(event["text"][shown:], end="", flush=True)
        shown = len(event["text"])
    print()
