"""Renders messages as a prompt, with the checkpoint's Jinja template or a built-in format.

``load_chat_template`` uses ``--chat-template`` (a name or a file), else the checkpoint's template,
else the built-in format that matches the folder's name.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import nodes

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.base.nearest import suggestion
from radixlm.text.conversations import CONVERSATIONS, Conversation, guess_name, read_json
from radixlm.text.function_messages import with_tool_calls
from radixlm.text.template import Template
from radixlm.text.tokenizer import Tokenizer

ContentFormat = Literal["string", "openai"]
Message = Mapping[str, Any]
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_TEXT_TYPES = ("text", "input_text", "output_text")
# a test for the role: the word alone stands in what is written about tools
_FUNCTION_ROLE = re.compile(r"""role["'\]]*\s*(?:==|in\b)[^%}]{0,80}["']function["']""")
_REASONING = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """The chat template of one checkpoint. Immutable, safe to share between threads.

    ``stops`` are stop strings besides the EOS token (built-in formats only).
    ``adds_special_tokens``: the tokenizer adds BOS (built-in formats contain none; a checkpoint's
    template contains its own).
    ``content_format``: "openai" if the template loops over the parts of a content, else "string".
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
        stops: tuple[str, ...] = (),
        media: Mapping[str, str] | None = None,
        adds_special_tokens: bool = False,
    ) -> None:
        """Raises InvalidRequest if a template does not compile."""
        self._template = Template(source)
        self._tool_template = Template(tool_source) if tool_source is not None else self._template
        self._special_tokens = dict(special_tokens or {})
        self.media: Mapping[str, str] = media if media is not None else {}
        self.source = source
        self.stops = stops
        self.adds_special_tokens = adds_special_tokens
        self._has_functions = bool(_FUNCTION_ROLE.search(source + (tool_source or "")))
        self.content_format: ContentFormat = detect_content_format(self._template)
        facts = source, tool_source, self._special_tokens, adds_special_tokens
        self.identity = json.dumps(facts, default=str, sort_keys=True)  # of what text messages give

    def mentions(self, text: str) -> bool:
        """Whether the template's source contains ``text`` ("enable_thinking", "<think>")."""
        return text in self.source or text in self._tool_template.source

    def names_role(self, role: str) -> bool:
        """Whether the template writes messages of ``role`` apart: its source has the quoted name
        (``message.role == "ipython"``)."""
        return bool(role) and (self.mentions(f"'{role}'") or self.mentions(f'"{role}"'))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. ``template_kwargs`` are variables of the template (enable_thinking, ...);
        ``chat_template`` replaces the template for this request, where the caller allows it.

        With ``continue_final_message`` the prompt ends inside the last message, which the model
        continues; there is no generation prompt then. InvalidRequest names the field
        ("messages[2].content").
        """
        template = self._tool_template if tools else self._template
        if chat_template is not None:
            template = Template(chat_template)
        content_format = self.content_format
        if template is not self._template:
            content_format = detect_content_format(template)
        chat = self._read_messages(messages, content_format, template.source)
        variables = {
            **self._special_tokens,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            **(template_kwargs or {}),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if not continue_final_message:
            return template.render(variables)
        return _render_continued(template, variables, chat)

    def _read_messages(
        self, messages: Sequence[Message], content_format: ContentFormat, source: str
    ) -> list[dict[str, Any]]:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequest("messages must be a list with at least one message", "messages")
        counts: dict[str, int] = {}
        chat = []
        for index, message in enumerate(with_tool_calls(messages, self._has_functions)):
            read = _read_message(message, f"messages[{index}]")
            if read["role"] == "developer" and "developer" not in source:
                read["role"] = "system"  # OpenAI's newer name of the same role
            content = read["content"]
            if isinstance(content, list):
                where = f"messages[{index}].content"
                parts = _read_parts(content, where)
                if content_format == "string":
                    read["content"] = self._join_parts(parts, counts)
                else:
                    read["content"] = parts
            chat.append(read)
        return chat

    def _join_parts(self, parts: list[dict[str, Any]], counts: dict[str, int]) -> str:
        """Parts as one text: texts joined with spaces, media replaced by their placeholders."""
        text = ""
        for part in parts:
            kind = part["type"]
            if kind != "text":
                counts[kind] = counts.get(kind, 0) + 1
                text += self.media.get(kind, "").replace("{index}", str(counts[kind]))
            elif text and not text.endswith(("\n", " ")) and not self.media:
                text += " " + part["text"]
            else:
                text += part["text"]
        return text


def _read_message(message: Any, where: str) -> dict[str, Any]:
    """A copy of one message without null fields, tool-call arguments as objects."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", where)
    read = {str(key): value for key, value in message.items() if value is not None}
    if not isinstance(read.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string", f"{where}.role")
    content = read.setdefault("content", "")
    if not isinstance(content, str | list):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of parts", f"{where}.content"
        )
    if "tool_calls" in read:
        read["tool_calls"] = _read_calls(read["tool_calls"], f"{where}.tool_calls")
    reasoning = next((read[name] for name in _REASONING if name in read), None)
    if reasoning is not None:
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    return read


def _read_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", where)
    read = []
    for index, call in enumerate(calls):
        here = f"{where}[{index}].function"
        if not isinstance(call, Mapping):
            raise InvalidRequest(f"{where}[{index}] must be an object", f"{where}[{index}]")
        function = call.get("function")
        if function is not None and not isinstance(function, Mapping):
            raise InvalidRequest(f"{here} must be an object", here)
        if function is not None:
            arguments = _read_arguments(function.get("arguments"))
            call = {**call, "function": {**function, "arguments": arguments}}
        read.append({key: value for key, value in call.items() if value is not None})
    return read


def _read_arguments(arguments: Any) -> Any:
    """Clients send JSON text, templates expect an object; other text is kept as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _read_parts(parts: list[Any], where: str) -> list[dict[str, Any]]:
    read = []
    for index, part in enumerate(parts):
        here = f"{where}[{index}]"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"{here} must be an object", here)
        kind = part.get("type")
        if kind in _TEXT_TYPES:
            if not isinstance(part.get("text"), str):
                raise InvalidRequest(f"{here}.text must be a string", f"{here}.text")
            read.append({"type": "text", "text": part["text"]})
        elif isinstance(kind, str) and kind in _MEDIA:
            read.append({"type": _MEDIA[kind]})
        elif kind in ("thinking", "reasoning") and isinstance(
            thought := part.get("thinking", part.get("text")), str
        ):
            read.append({"type": "thinking", "thinking": thought})
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            read.append({"type": "text", "text": part["refusal"]})
        else:
            raise InvalidRequest(
                f"{here}.type {kind!r:.60} is unknown; text and image_url are known", f"{here}.type"
            )
    return read


def _render_continued(
    template: Template, variables: Mapping[str, Any], chat: list[dict[str, Any]]
) -> str:
    """Render with a marker after the last text, and truncate there."""
    last = chat[-1]
    where = f"messages[{len(chat) - 1}].content"
    content = last["content"]
    if isinstance(content, list):
        texts = [part for part in content if part["type"] == "text"]
        if not texts:
            raise InvalidRequest("the last message has no text to continue", where)
        texts[-1]["text"] += _TAG
    else:
        last["content"] = content + _TAG
    text = template.render(variables)
    position = text.rfind(_TAG.strip())
    if position < 0:
        raise InvalidRequest("the template drops the text of the last message", where)
    if text.startswith(_TAG, position):
        return text[:position]
    return text[:position].rstrip()  # the template trims its text: continue without the space


def detect_content_format(template: Template) -> ContentFormat:
    """ "openai" if the template loops over a message's content, directly or by another name."""
    names = {"content"}
    for assignment in template.tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    for macro in template.tree.find_all(nodes.Macro):
        names.update(arg.name for arg in macro.args if "content" in arg.name)
    loops = template.tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    return False


def from_conversation(
    conversation: Conversation, special_tokens: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """A built-in format as a template."""
    return ChatTemplate(
        conversation.source(),
        special_tokens,
        stops=conversation.stops,
        media=conversation.media,
        adds_special_tokens=True,
    )


def load_chat_template(
    tokenizer: Tokenizer,
    argument: str | None = None,
    model_path: str | Path = "",
    media: Mapping[str, str] | None = None,
) -> ChatTemplate:
    """The template to use. ``argument`` is the value of --chat-template: a built-in name, the name
    of one of the checkpoint's templates, a .jinja or a .json file; else ConfigError. ``media``: the
    model's placeholders ("image" -> "<image>") for templates whose content is one text.
    """
    try:
        if argument is not None:
            return _load_argument(tokenizer, argument, media)
        source = tokenizer.chat_template()
        if source is None:
            name = guess_name(str(model_path))
            return from_conversation(CONVERSATIONS[name], tokenizer.special_tokens)
        tool_source = tokenizer.chat_template(has_tools=True)
        if tool_source == source:
            tool_source = None
        return ChatTemplate(source, tokenizer.special_tokens, tool_source, media=media)
    except InvalidRequest as error:
        origin = f"--chat-template {argument}" if argument else "the checkpoint's chat template"
        raise ConfigError(f"{origin}: {error.message}") from None


def _load_argument(
    tokenizer: Tokenizer, argument: str, media: Mapping[str, str] | None
) -> ChatTemplate:
    if argument in CONVERSATIONS:
        return from_conversation(CONVERSATIONS[argument], tokenizer.special_tokens)
    if (source := tokenizer.chat_template(argument)) is not None:
        return ChatTemplate(source, tokenizer.special_tokens, media=media)
    path = Path(argument)
    if not path.is_file():
        names = [*CONVERSATIONS, *tokenizer.chat_templates]
        known = ", ".join(names) + suggestion(argument, names)
        raise ConfigError(f"--chat-template {argument!r} is no file and none of: {known}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {argument}: {error}") from None
    if path.suffix == ".json":
        return from_conversation(read_json(text, argument), tokenizer.special_tokens)
    return ChatTemplate(text, tokenizer.special_tokens, media=media)


def prompt_digest(folder: Path, mode: str, template: ChatTemplate) -> str:
    """Equal where tokenizer and template make the same ids of the same chat. ``folder``: of the
    tokenizer; ``mode``: of --tokenizer-mode."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        digest.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
    if not (folder / "tokenizer.json").is_file():
        digest.update(str(folder).encode())  # files of another kind: equal to nobody's
    digest.update(template.identity.encode())
    digest.update(mode.encode())
    return digest.hexdigest()[:32]
