"""Conversations: the chat template, the tokenizer and which tokens a loss looks at."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>",
           "<|vision_end|>"]  # fmt: skip
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
          "</think>", "<tools>", "</tools>"]  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB = 2048
SHORT_ANSWER, SHORT_WEIGHT = 6, 3  # tokens, loss weight
TEMPLATE = r"""{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- macro text(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content %}
        {%- for part in content %}
            {%- if part.type == "text" %}{{- part.text }}
            {%- elif part.type in ("image", "image_url") %}
                {{- "<|vision_start|><|image_pad|><|vision_end|>" }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set start = 0 %}
{%- if messages and messages[0].role == "system" %}{% set start = 1 %}{% endif %}
{%- if tools %}
    {{- "<|im_start|>system\n" }}
    {%- if start == 1 %}{{- text(messages[0].content) + "\n\n" }}{% endif %}
    {{- "# Tools\n\nCall a function when it helps.\n<tools>" }}
    {%- for tool in tools %}{{- "\n" + (tool | tojson) }}{% endfor %}
    {{- "\n</tools>\n\nFor each call write\n<tool_call>\n{\"name\": ..., \"arguments\": {...}}\n" }}
    {{- "</tool_call><|im_end|>\n" }}
{%- elif start == 1 %}
    {{- "<|im_start|>system\n" + text(messages[0].content) + "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages[start:] %}
    {%- set index = loop.index0 + start %}
    {%- if message.role == "assistant" %}
        {%- set content = text(message.content) %}
        {%- set reasoning = message.reasoning_content or "" %}
        {%- if "</think>" in content %}
            {%- set reasoning = content.split("</think>")[0].split("<think>")[-1] %}
            {%- set content = content.split("</think>")[-1].lstrip("\n") %}
        {%- endif %}
        {%- if index < ns.last_user %}{% set reasoning = "" %}{% endif %}
        {{- "<|im_start|>assistant\n<think>\n" + reasoning.strip("\n") }}
        {{- "\n</think>\n\n" + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {%- if content or not loop.first %}{{- "\n" }}{% endif %}
            {{- "<tool_call>\n{\"name\": \"" + call.name + "\", \"arguments\": " }}
            {%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{% endif %}
            {{- "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[index - 1].role != "tool" %}
            {{- "<|im_start|>user" }}
        {%- endif %}
        {{- "\n<tool_response>\n" + text(message.content) + "\n</tool_response>" }}
        {%- if loop.last or messages[index + 1].role != "tool" %}{{- "<|im_end|>\n" }}{% endif %}
    {%- else %}
        {%- set role = "system" if message.role == "developer" else message.role %}
        {{- "<|im_start|>" + role + "\n" + text(message.content) + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if not (enable_thinking is defined and enable_thinking) %}
        {{- "<think>\n\n</think>\n\n" }}
    {%- endif %}
{%- endif %}
"""
Message = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """One training document; `answer` is what a test compares the last turn with."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    task: str = ""

    def prompt(self) -> list[Message]:
        """The messages without the last assistant turn."""
        return self.messages[:-1]

    def answer(self) -> Message:
        """The last assistant turn."""
        return self.messages[-1]


def user(content: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": content}


def reply(content: str, reasoning: str = "", calls: list[Message] | None = None) -> Message:
    """An assistant turn."""
    turn: Message = {"role": "assistant", "content": content}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = calls
    return turn


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


_COMPILED = _environment().from_string(TEMPLATE)


def render(conversation: Conversation, prompt_only: bool = False, thinking: bool = False) -> str:
    """The conversation as text; with `prompt_only`, up to where the model starts to write."""
    messages = conversation.prompt() if prompt_only else conversation.messages
    return _COMPILED.render(
        messages=messages,
        tools=conversation.tools,
        add_generation_prompt=prompt_only,
        enable_thinking=thinking,
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of 2,048 tokens in which every digit stands alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_markup(texts), trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(MARKUP)
    return tokenizer


def _without_markup(texts: list[str]) -> list[str]:
    """Texts without the added tokens, so that no merge is spent on them."""
    for token in SPECIAL + MARKUP:
        texts = [text.replace(token, " ") for text in texts]
    return texts


class Encoder:
    """Text to token ids and a mask of the tokens that the assistant writes."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        encode = self.ids
        self.start = encode("<|im_start|>assistant\n")
        self.empty = encode("<think>\n\n</think>\n\n")
        self.end = encode("<|im_end|>")[0]

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def document(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Ids of a conversation and the loss weight of each: 0 where the assistant is silent.

        A short answer is hard to get right and has few tokens to learn from: each counts more.
        """
        ids = self.ids(render(conversation).rstrip("\n"))
        mask = [0] * len(ids)
        width, i = len(self.start), 0
        while i < len(ids):
            if ids[i] != self.start[0] or ids[i : i + width] != self.start:
                i += 1
                continue
            i += width
            if ids[i : i + len(self.empty)] == self.empty:
                i += len(self.empty)
            end = ids.index(self.end, i) + 1 if self.end in ids[i:] else len(ids)
            weight = SHORT_WEIGHT if end - i <= SHORT_ANSWER else 1
            mask[i:end] = [weight] * (end - i)
            mask[i] = SHORT_WEIGHT  # where it decides what kind of answer this is
            i = end
        return ids, mask
