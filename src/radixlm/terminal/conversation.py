"""Conversation: messages, parameters and the slash commands that change them. Prints nothing."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from radixlm.base.errors import ConfigError, reason
from radixlm.base.nearest import suggestion
from radixlm.base.record import Record
from radixlm.terminal.api import Api, Event

_NUMBERS = {"max_tokens": int, "seed": int, "top_k": int, "n": int}
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
           "repetition_penalty")  # fmt: skip


class Figures(Record):
    """Of one answer; seconds."""

    num_prompt: int = 0
    num_cached: int | None = None  # a server may not tell
    num_output: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    thinking: str = ""
    finish: str = ""

    def line(self) -> str:
        """What a person wants to know."""
        decode_s = self.total_s - self.first_s
        speed = f", {(self.num_output - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else ""
        cut = ", cut at max_tokens" if self.finish == "length" else ""
        cached = "" if self.num_cached is None else f", {self.num_cached} of them cached"
        return (
            f"{self.num_output} tokens{speed}, first after {self.first_s:.2f} s, "
            f"{self.num_prompt} prompt tokens{cached}{cut}"
        )


class Conversation:
    """``messages`` are those of the API. ``figures``: of the last answer."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.messages: list[dict[str, Any]] = []
        self.params: dict[str, Any] = {}
        self.is_thinking: bool | None = None  # None: as the model does by itself
        self.figures = Figures()
        self._media: list[dict[str, Any]] = []  # of the next message
        self.num_turns = self.num_tokens = 0

    # ---- answers ---------------------------------------------------------------------------

    def ask(self, text: str) -> Iterator[Event]:
        """The answer to a message. Both enter the conversation when the answer has begun; a
        refused message leaves it as it was, and so does one that is stopped before any text."""
        content: Any = [*self._media, {"type": "text", "text": text}] if self._media else text
        message = {"role": "user", "content": content}
        fields: dict[str, Any] = {**self.params, "messages": [*self.messages, message]}
        if self.is_thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.is_thinking}
        started_s, first_s, said, thought = time.monotonic(), 0.0, "", ""
        usage: Any = {}
        finish = ""
        events = self.api.answer(fields)
        try:
            for event in events:
                if event.kind in ("text", "thinking") and not first_s:
                    first_s = time.monotonic()
                said += event.text if event.kind == "text" else ""
                thought += event.text if event.kind == "thinking" else ""
                finish = event.text if event.kind == "finish" else finish
                usage = event.usage or usage
                yield event
        finally:
            events.close()  # type: ignore[attr-defined]
            if said or finish:
                self.messages += [message, {"role": "assistant", "content": said}]
                self._media = []
            details = usage.get("prompt_tokens_details") or {}
            self.figures = Figures(
                usage.get("prompt_tokens") or 0,
                details.get("cached_tokens"),
                usage.get("completion_tokens") or 0,
                (first_s or time.monotonic()) - started_s,
                time.monotonic() - started_s,
                thought,
                finish,
            )
            self.num_turns += 1
            self.num_tokens += self.figures.num_output

    # ---- commands --------------------------------------------------------------------------

    def command(self, line: str) -> str | None:
        """Obey "/name argument"; what to say of it, None for ``/retry``, whose message is to be
        asked again. ConfigError says what is wrong with it."""
        name, _, rest = line.partition(" ")
        known = COMMANDS.get(name)
        if known is None:
            raise ConfigError(f"{name} is no command{suggestion(name, COMMANDS)}; /help lists them")
        return known[1](self, rest.strip())

    def _model(self, name: str) -> str:
        if not name:
            names = ", ".join(self.api.models())
            return f"{self.api.model} of {self.api.url}; it serves: {names}"
        names_known = self.api.models()
        if name not in names_known:
            raise ConfigError(f"/model: no {name!r}; the server has {', '.join(names_known)}")
        self.api.model = name
        return f"the next answers are by {name}"

    def _system(self, text: str) -> str:
        self.messages = [m for m in self.messages if m["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})
        return "the system message is set" if text else "no system message"

    def _image(self, path: str) -> str:
        return self.attach(path, "image")

    def _audio(self, path: str) -> str:
        return self.attach(path, "audio")

    def attach(self, path: str, kind: str, name: str = "") -> str:
        """Send a file with the next message. ConfigError, which begins with ``name``, or with the
        command, where it cannot be read."""
        if not path:
            self._media = []
            return "the next message has no attachment"
        if path.startswith(("http://", "https://", "data:")):
            url = path
        else:
            try:
                content = Path(path).expanduser().read_bytes()
            except OSError as error:
                raise ConfigError(f"{name or f'/{kind}'}: {reason(error)}") from error
            mime = mimetypes.guess_type(path)[0] or f"{kind}/{'png' if kind == 'image' else 'wav'}"
            url = f"data:{mime};base64,{base64.b64encode(content).decode()}"
        self._media.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
        return f"{path[:60]} goes with the next message ({len(self._media)} attached)"

    def _set(self, text: str) -> str:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        if not name:
            return ", ".join(f"{n} {v}" for n, v in self.params.items()) or "nothing is set"
        if name not in (*_NUMBERS, *_FLOATS, "stop"):
            known = (*_NUMBERS, *_FLOATS, "stop")
            raise ConfigError(f"/set: no {name!r}{suggestion(name, known)}; {', '.join(known)}")
        value = value.strip()
        if not value:
            self.params.pop(name, None)
            return f"{name} is the model's own"
        try:
            self.params[name] = (
                int(value) if name in _NUMBERS else value if name == "stop" else float(value)
            )
        except ValueError:
            raise ConfigError(f"/set {name}: {value!r} is not a number; try 1") from None
        return f"{name} is {self.params[name]}"

    def _stats(self, _: str) -> str:
        total = f"{self.num_turns} answers, {self.num_tokens} tokens"
        return f"last answer: {self.figures.line()}\n{total}"

    def _save(self, path: str) -> str:
        if not path:
            raise ConfigError("/save: name a file, such as /save talk.json")
        state = {"model": self.api.model, "params": self.params, "messages": self.messages}
        try:
            Path(path).expanduser().write_text(json.dumps(state, ensure_ascii=False, indent=1))
        except OSError as error:
            raise ConfigError(f"/save: {reason(error)}") from error
        return f"{len(self.messages)} messages in {path}"

    def _load(self, path: str) -> str:
        try:
            state = json.loads(Path(path).expanduser().read_text())
            messages, params = list(state["messages"]), dict(state.get("params") or {})
            if not all(map(_is_message, messages)):
                raise ValueError("messages have a role and a content, a text or parts with a type")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"/load {path}: {error!s:.200}") from error
        self.messages, self.params = messages, params
        return f"{len(messages)} messages"

    def _clear(self, _: str) -> str:
        self.messages = [m for m in self.messages if m["role"] == "system"]
        return "the conversation begins anew"

    def _take_back(self) -> str:
        """Remove the last message and its answer; the message's text."""
        users = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not users:
            raise ConfigError("there is no message yet")
        content = self.messages[users[-1]]["content"]
        self.messages = self.messages[: users[-1]]
        if isinstance(content, str):
            return content
        self._media = [part for part in content if part["type"] != "text"]
        return "".join(str(part.get("text", "")) for part in content if part["type"] == "text")

    def _undo(self, _: str) -> str:
        return f"taken back: {self._take_back():.60}"

    def _retry(self, _: str) -> None:
        if not any(m["role"] == "user" for m in self.messages):
            raise ConfigError("/retry: there is no message yet")

    def again(self) -> str:
        """The last message, taken back to be asked again."""
        return self._take_back()

    def _think(self, _: str) -> str:
        self.is_thinking = not self.is_thinking
        return "thinking is " + ("on" if self.is_thinking else "off")

    def _thought(self, _: str) -> str:
        return self.figures.thinking or "the last answer came without thinking"

    def _help(self, _: str) -> str:
        lines = [f"  {name + ' ' + args:<22} {text}" for name, (args, _, text) in _HELP.items()]
        return "\n".join([*lines, *_KEYS])


def _is_message(one: Any) -> bool:
    if not isinstance(one, dict) or "role" not in one:
        return False
    content = one.get("content")
    parts = content if isinstance(content, list) else []
    is_known = isinstance(content, str | list)
    return is_known and all(isinstance(part, dict) and "type" in part for part in parts)


Command = Callable[[Conversation, str], str | None]
_HELP: dict[str, tuple[str, Command, str]] = {
    "/help": ("", Conversation._help, "this list"),
    "/model": ("[NAME]", Conversation._model, "which model answers; another one"),
    "/system": ("[TEXT]", Conversation._system, "set or remove the system message"),
    "/image": ("[PATH|URL]", Conversation._image, "an image for the next message; none: remove"),
    "/audio": ("[PATH|URL]", Conversation._audio, "a recording for the next message"),
    "/set": ("[NAME VALUE]", Conversation._set, "temperature, top_p, max_tokens, seed, stop, ..."),
    "/think": ("", Conversation._think, "switch thinking"),
    "/thought": ("", Conversation._thought, "what the model thought before its last answer"),
    "/stats": ("", Conversation._stats, "tokens, speed and cache of the last answer"),
    "/save": ("FILE", Conversation._save, "write the conversation"),
    "/load": ("FILE", Conversation._load, "read a conversation"),
    "/undo": ("", Conversation._undo, "take back the last message and its answer"),
    "/retry": ("", Conversation._retry, "ask the last message again"),
    "/clear": ("", Conversation._clear, "forget all but the system message"),
    "/exit": ("", Conversation._help, "leave (Ctrl-D too)"),
}
COMMANDS: dict[str, tuple[str, Command]] = {
    name: (args, run) for name, (args, run, _) in _HELP.items()
}
_KEYS = ('\n  """ begins and ends a message of several lines (Alt+Enter: a new line).',
         "  Ctrl-C stops an answer; twice, or at an empty line, it leaves.")  # fmt: skip
