"""JSON calls between markers: the formats that differ in the markers only."""

from radixlm.text.tools.json_calls import JsonBlocks, NamedJsonBlocks
from radixlm.text.tools.scan import Malformed, Step


class InternS1(JsonBlocks):
    """``<|action_start|> <|plugin|>\\n{"name": "f", "parameters": {...}}<|action_end|>``"""

    starts = ("<|action_start|>",)
    ends = ("<|action_end|>",)

    def read_block(self, marker: str) -> Step[None]:
        yield from self.scanner.spaces()
        yield from self.scanner.accept("<|plugin|>")
        yield from super().read_block(marker)


class Apertus(NamedJsonBlocks):
    """``<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>``"""

    starts = ("<|tools_prefix|>",)
    ends = ("<|tools_suffix|>",)


class Cohere(JsonBlocks):
    """``<|START_ACTION|>[{"tool_name": "f", "parameters": {...}}]<|END_ACTION|>``"""

    starts = ("<|START_ACTION|>",)
    ends = ("<|END_ACTION|>",)
    stripped = ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


class Granite(JsonBlocks):
    """``<|tool_call|>[{"name": "f", "arguments": {...}}]``: Granite 3; 4 writes Hermes tags."""

    starts = ("<|tool_call|>", "<tool_call>")

    def read_block(self, marker: str) -> Step[None]:
        yield from super().read_block(marker)
        if marker == "<tool_call>":
            yield from self.read_end("</tool_call>")


class Phi4(JsonBlocks):
    """``<|tool_call|>[...]<|/tool_call|>`` or ``functools[...]``: Phi-4-mini."""

    starts = ("<|tool_call|>", "functools[")

    def read_block(self, marker: str) -> Step[None]:
        if marker == "functools[":
            self.scanner.position -= 1
        yield from super().read_block(marker)
        if marker == "<|tool_call|>":
            yield from self.read_end("<|/tool_call|>")


class GigaChat3(JsonBlocks):
    """``<|message_sep|>\\n\\nfunction call<|role_sep|>\\n{...}`` or ``<|function_call|>{...}``"""

    starts = (
        "<|function_call|>",
        "function call<|role_sep|>",
        "<|message_sep|>\n\nfunction call<|role_sep|>",
    )
    stripped = ("<|message_sep|>",)
    ends = ("<|message_sep|>", "</s>")


class Inkling(JsonBlocks):
    """``<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {}}<|end_message|>``"""

    starts = ("<|content_invoke_tool_json|>", "<|message_model|>")
    ends = ("<|end_message|>",)
    stripped = (
        "<|content_text|>",
        "<|content_thinking|>",
        "<|end_message|>",
        "<|content_model_end_sampling|>",
    )

    def read_block(self, marker: str) -> Step[None]:
        if marker == "<|message_model|>":
            found = yield from self.scanner.accept(*self.stripped)
            if found:
                return  # a text message: only its header was read
            yield from self.read_name()
            if not (yield from self.scanner.accept(self.starts[0])):
                raise Malformed
        yield from super().read_block(marker)
