"""Conversations as inputs of the pooling routes, as vLLM takes them: ``messages`` in the place of
``input``."""

from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.openai.conversation import Tools, check_messages, rendered
from radixlm.entrypoints.http.openai.protocol import ChatRequest
from radixlm.entrypoints.http.openai.thinking import template_variables
from radixlm.entrypoints.http.pooling.pool import MultimodalPrompt, Prompt
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.tokenization import check_template, encode
from radixlm.entrypoints.media import sources_of, with_options
from radixlm.entrypoints.request_model import Body, Objects, make


class Conversation(Body):
    """``messages``, written by the chat template, and how. ``add_special_tokens``, of texts too:
    None for those that the template, or a text, needs."""

    messages: Objects | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


def check_input(state: ServerState, body: Conversation, value: Any) -> None:
    """InvalidRequest unless one of ``value``, the field ``input``, and ``messages`` is given."""
    if (value is None) == (body.messages is None):
        raise InvalidRequest("exactly one of input and messages must be given", "input")
    check_template(state, body.chat_template)
    if value is None:
        return
    for name, field in Conversation.model_fields.items():
        given = getattr(body, name)
        if given != field.default and name != "add_special_tokens":
            raise InvalidRequest(f"{name}: needs messages in the place of input", name)


async def prompt_of(state: ServerState, body: Conversation, truncates: bool) -> Prompt:
    """The prompt of ``body.messages``. ``truncates``: it may be longer than the context."""
    names = Conversation.model_fields.keys()
    chat = make(ChatRequest, {name: getattr(body, name) for name in names})
    check_messages(chat.messages, state.template)
    sources = tuple(with_options(sources_of(chat.messages, state.media), body.mm_processor_kwargs))
    if state.media is not None and state.media.embeds_images:
        return MultimodalPrompt(_text(chat.messages), sources) if sources else _text(chat.messages)
    if sources and state.media is not None:
        await state.media.ready()  # the prompt has its placeholders
    text = await rendered(state, chat, Tools(), template_variables(state, chat))
    adds = state.require_template().adds_special_tokens
    adds = adds if body.add_special_tokens is None else body.add_special_tokens
    if sources:
        return MultimodalPrompt(text, sources, is_rendered=True, adds_special_tokens=adds)
    return await encode(state, text, "messages", adds, truncates=truncates)


def _text(messages: list[dict[str, Any]]) -> str:
    """The text of messages for a model without a chat template."""
    contents = [message.get("content") for message in messages]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [one])]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))
