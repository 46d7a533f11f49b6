"""How a model's messages are written and read: chat template, tool calls, reasoning, media."""

import contextlib
import json

from radixlm.base import env
from radixlm.base.errors import ConfigError, RadixError
from radixlm.entrypoints.http.openai.thinking import thinking_switch
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.media import make_reader
from radixlm.text.chat import ChatTemplate, load_chat_template
from radixlm.text.reasoning import registry as reasoning
from radixlm.text.tokenizer import Tokenizer
from radixlm.text.tools import registry as tools

_FROM_TEMPLATE = ("auto", "response_template")
_PROBE = [{"role": "user", "content": "hi"}]


def set_formats(state: ServerState, tokenizer: Tokenizer) -> None:
    """Set the chat template, the reader of media and the formats of tool calls and reasoning.
    ConfigError for a bad template or parser."""
    serve = state.config.serve
    state.media = make_reader(state.config, state.info)
    if state.media is not None:
        state.media.warm()
    media = state.media.placeholders if state.media is not None else None
    facts = state.info.media
    if facts is not None and facts.is_encoder_decoder and serve.chat_template is None:
        return  # a speech-to-text model has no chat template
    template = load_chat_template(tokenizer, serve.chat_template, state.info.folder, media)
    state.template = template
    state.template_defaults = json.loads(serve.default_chat_template_kwargs or "{}")
    state.tool_format = _tool_format(serve.tool_call_parser, template)
    state.reasoning_format = _reasoning_format(serve.reasoning_parser, template)
    state.tool_strict_level = env.TOOL_STRICT_LEVEL.get()
    thinks = env.DEFAULT_THINKING.get()
    if thinks is not None:
        switch = thinking_switch(state.reasoning_format)
        state.template_defaults = {switch: thinks, **state.template_defaults}


def _tool_format(option: str, template: ChatTemplate) -> str | None:
    if option == "none":
        return None
    if option in _FROM_TEMPLATE:
        return tools.detect(template.source)
    if option not in tools.NAMES:
        raise ConfigError(f"--tool-call-parser {option}: one of {', '.join(tools.NAMES)}")
    return option


def _reasoning_format(option: str, template: ChatTemplate) -> str | None:
    if option == "none":
        return None
    if option not in _FROM_TEMPLATE:
        if option not in reasoning.NAMES:
            raise ConfigError(f"--reasoning-parser {option}: one of {', '.join(reasoning.NAMES)}")
        return option
    prompt = None
    with contextlib.suppress(RadixError):
        prompt = template.render(_PROBE)
    return reasoning.detect(template.source, prompt)
