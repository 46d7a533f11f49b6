"""``radixlm chat``: talk to a model in the terminal, answers streaming as they are made."""

import contextlib
import sys
from typing import Any

from radixlm.base.errors import RequestError
from radixlm.base.log import set_up_logging
from radixlm.config.parser import OptionParser, add_options, collect
from radixlm.config.server_config import flat
from radixlm.entrypoints.offline import Engine
from radixlm.text.chat import ChatTemplate, load_chat_template

HELP = """/clear forgets the conversation, /system TEXT sets the system message, /think switches
thinking, /exit leaves (so does Ctrl-D). Ctrl-C stops an answer."""


class Conversation:
    """The messages so far and the engine that answers them."""

    def __init__(self, engine: Engine, template: ChatTemplate, params: dict[str, Any]) -> None:
        self._engine, self._template, self._params = engine, template, params
        self.messages: list[dict[str, Any]] = []
        self.is_thinking = False

    def system(self, text: str) -> None:
        """Start again with a system message ("" for none)."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def answer(self, text: str) -> None:
        """Print the answer to ``text`` as it comes, and add both to the conversation."""
        self.messages.append({"role": "user", "content": text})
        kwargs = {"enable_thinking": self.is_thinking}
        prompt = self._template.render(self.messages, template_kwargs=kwargs)
        assert self._engine.tokenizer is not None
        ids = self._engine.tokenizer.encode(prompt, self._template.adds_special_tokens)
        shown = ""
        events = self._engine.generate(input_ids=ids, sampling_params=self._params, stream=True)
        with contextlib.closing(events), contextlib.suppress(KeyboardInterrupt):
            for event in events:
                print(event["text"][len(shown) :], end="", flush=True)
                shown = event["text"]
        print()
        self.messages.append({"role": "assistant", "content": shown.strip()})


def _parser() -> OptionParser:
    parser = OptionParser(prog="radixlm chat", description="Talk to a model in the terminal.")
    parser.add_argument("--system", default="", help="System message.")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="Longest answer.")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token.")
    parser.add_argument("--think", action="store_true", help="Let the model think first.")
    add_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """Chat until the end of input."""
    values = _parser().read(argv)
    system, think = values.pop("system", ""), values.pop("think", False)
    params: dict[str, Any] = {"max_new_tokens": values.pop("max_new_tokens", 512)}
    temperature = values.pop("temperature", None)
    if temperature is not None:
        params["temperature"] = temperature
    config, given = collect(values)
    set_up_logging("chat", config.observe.log_level if "log_level" in given else "warning")
    options = {n: v for n, v in flat(config, show_secrets=True).items() if n in given}
    with Engine(**options) as engine:
        if engine.tokenizer is None:
            print("radixlm chat: needs a tokenizer; leave out --skip-tokenizer-init")
            return 2
        template = load_chat_template(engine.tokenizer, config.serve.chat_template)
        params["stop"] = list(template.stops)
        conversation = Conversation(engine, template, params)
        conversation.system(system)
        conversation.is_thinking = think
        print(f"{engine.config.serve.served_model_name}: say something (/help for commands)")
        _loop(conversation)
    return 0


def _loop(conversation: Conversation) -> None:
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/quit"):
            return
        if command == "/help":
            print(HELP)
        elif command == "/clear":
            conversation.messages = [m for m in conversation.messages if m["role"] == "system"]
        elif command == "/system":
            conversation.system(rest)
        elif command == "/think":
            conversation.is_thinking = not conversation.is_thinking
            print("thinking is " + ("on" if conversation.is_thinking else "off"))
        elif text:
            try:
                conversation.answer(text)
            except RequestError as error:
                print(f"({error})")
