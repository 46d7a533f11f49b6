"""A tokenizer and its chat template at the gateway, with caches of what was tokenized."""

from __future__ import annotations

import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from radixlm.base.errors import ConfigError
from radixlm.router.prefix_hashes import TokenIds
from radixlm.text.chat import ChatTemplate, load_chat_template, prompt_digest
from radixlm.text.tokenizer import Tokenizer, load_tokenizer

_PROBES: Final = ("a b", " a", "Hello\n\nworld", "\n1 2", "")
_NOT_PLAIN: Final = (
    "tools functions documents chat_template chat_template_kwargs reasoning_effort enable_thinking "
    "thinking continue_final_message add_generation_prompt add_special_tokens input_ids "
    "truncate_prompt_tokens mm_processor_kwargs"
).split()
_PLAIN_ROLES: Final = frozenset(("system", "developer", "user", "assistant"))
_PLAIN_KEYS: Final = frozenset(("role", "content", "name"))


class GatewayTokenizer:
    """One tokenizer. ``digest``: equal to a worker's where both make the same ids of a chat."""

    def __init__(self, name: str, folder: str, chat_template: str | None, options: Any) -> None:
        """Reads the files of ``folder``. ConfigError, CheckpointError: they cannot be used."""
        if not Path(folder).is_dir():
            raise ConfigError(
                f"tokenizer {folder!r} is no folder on this machine; --tokenizer-path FOLDER works"
            )
        self.id, self.name, self.source = str(uuid.uuid4()), name, folder
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.template: ChatTemplate = load_chat_template(self.tokenizer, chat_template, folder)
        has_clock = self.template.mentions("strftime_now")  # two machines' clocks differ
        self.digest = "" if has_clock else prompt_digest(Path(folder), "auto", self.template)
        self._whole = _Cache(options.tokenizer_cache_l0_max_entries, 1 << 62)
        self._prefixes = _Cache(1 << 62, options.tokenizer_cache_l1_max_memory)
        self._keeps_whole = options.tokenizer_cache_enable_l0
        self._boundary: re.Pattern[str] | None = None
        if options.tokenizer_cache_enable_l1:
            self._boundary = _boundary(self.tokenizer)

    def of_text(self, text: str, adds_special_tokens: bool) -> TokenIds:
        """Token ids of a text, int32 [n]."""
        key = text if adds_special_tokens else "\0" + text
        found = self._whole.get(key) if self._keeps_whole else None
        if found is None:
            found = self._encode(text, adds_special_tokens)
            if self._keeps_whole:
                self._whole.put(key, found)
        return found

    def of_chat(self, fields: Mapping[str, Any]) -> TokenIds:
        """Token ids of the prompt of a chat's body. RadixError where a worker would refuse it."""
        tools = fields.get("tools") if fields.get("tool_choice") != "none" else None
        variables = dict(fields.get("chat_template_kwargs") or {})
        for name in ("enable_thinking", "reasoning_effort"):
            if fields.get(name) is not None:
                variables.setdefault(name, fields[name])
        text = self.template.render(
            fields["messages"],
            tools=tools or None,
            documents=fields.get("documents"),
            add_generation_prompt=fields.get("add_generation_prompt") is not False,
            continue_final_message=bool(fields.get("continue_final_message")),
            template_kwargs=variables,
        )
        adds = fields.get("add_special_tokens")
        return self.of_text(text, self.template.adds_special_tokens if adds is None else bool(adds))

    def _encode(self, text: str, adds: bool) -> TokenIds:
        """Ids by the longest prefix that is known: a special token ends what is tokenized
        together."""
        cuts = self._boundary if not adds else None  # BOS and EOS stand around the whole
        ends = [m.end() for m in cuts.finditer(text)] if cuts else []
        if not ends:
            return np.array(self.tokenizer.encode(text, adds), np.int32)
        start, parts = 0, []
        for end in reversed(ends):
            known = self._prefixes.get(text[:end])
            if known is not None:
                start, parts = end, [known]
                break
        if ends[-1] > start:
            head = self.tokenizer.encode(text[start : ends[-1]], False)
            parts = [np.concatenate([*parts, np.array(head, np.int32)])]
            self._prefixes.put(text[: ends[-1]], parts[0])
        tail = self.tokenizer.encode(text[ends[-1] :], False)
        return np.concatenate([*parts, np.array(tail, np.int32)])


def is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether a chat's prompt comes from roles and texts alone, as any server makes it."""
    messages = fields.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and not any(fields.get(name) is not None for name in _NOT_PLAIN)
        and all(
            isinstance(one, dict)
            and one.keys() <= _PLAIN_KEYS
            and one.get("role") in _PLAIN_ROLES
            and isinstance(one.get("content"), str)
            for one in messages
        )
    )


class _Cache:
    """The values last used, within a number of entries and of bytes; for several threads."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._values: OrderedDict[str, TokenIds] = OrderedDict()
        self._max_entries, self._max_bytes, self._num_bytes = max_entries, max_bytes, 0
        self._lock = threading.Lock()

    def get(self, key: str) -> TokenIds | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: str, value: TokenIds) -> None:
        with self._lock:
            if key not in self._values:
                self._num_bytes += _weight(key, value)
            self._values[key] = value
            while self._values and (
                len(self._values) > self._max_entries or self._num_bytes > self._max_bytes
            ):
                self._num_bytes -= _weight(*self._values.popitem(last=False))


def _weight(key: str, value: TokenIds) -> int:
    return int(value.nbytes) + 2 * len(key) + 300


def _boundary(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern of special tokens where texts may be cut, None if this tokenizer does not
    tokenize the parts as it does the whole."""
    names = [str(piece) for i in tokenizer.special_ids if (piece := tokenizer.id_to_piece(i))]
    if not names:
        return None
    for name in names[:4]:
        for before in _PROBES:
            for after in _PROBES:
                whole = tokenizer.encode(before + name + after, False)
                parts = tokenizer.encode(before + name, False), tokenizer.encode(after, False)
                if whole != parts[0] + parts[1]:
                    return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
