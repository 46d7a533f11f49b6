"""``<invoke name="F"><parameter name="p">v</parameter></invoke>`` with many prefixes.

DeepSeek V3.2 and later, GigaChat 3.5, MiniMax M2, Step 3, dots, Muse and MiniCPM 5 differ in
the names of the tags and in the markers around the invocations.
"""

from typing import ClassVar

from radixlm.text.tools import schema
from radixlm.text.tools.json_calls import JsonBlocks
from radixlm.text.tools.parameters import ArgumentWriter, RawValue, read_attribute, read_json_body
from radixlm.text.tools.scan import Step


class InvokeBlocks(JsonBlocks):
    """``outer`` and ``closing`` are the markers before and after a block of invocations."""

    outer: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[tuple[str, ...]] = ()
    invoke_tag: ClassVar[str] = "invoke"
    parameter_tag: ClassVar[str] = "parameter"
    value: ClassVar[RawValue]

    def __init_subclass__(cls) -> None:
        invoke, parameter = cls.invoke_tag, cls.parameter_tag
        cls.starts = (*cls.outer, f"<{invoke} ")
        cls.value = RawValue(f"</{parameter}>", f"<{parameter}", f"</{invoke}>", *cls.closing)

    def read_block(self, marker: str) -> Step[None]:
        scanner = self.scanner
        while marker in self.outer:
            yield from scanner.spaces()
            if (yield from scanner.peek()) in ("{", "["):
                yield from self.read_json_calls()
                break
            yield from scanner.accept("function<｜tool_sep｜>")
            marker = yield from scanner.expect(*self.starts)
        else:
            yield from self._invoke()
        if self.closing:
            yield from self.read_ends(*self.closing)

    def _invoke(self) -> Step[None]:
        scanner = self.scanner
        name = yield from read_attribute(self, "name")
        yield from scanner.spaces()
        if (yield from scanner.expect("/>", ">")) == "/>":  # without arguments
            ArgumentWriter(self, name).close()
            return
        end = f"</{self.invoke_tag}>"
        if (yield from read_json_body(self, name)):
            yield from self.read_end(end)
            return
        writer = ArgumentWriter(self, name)
        while True:
            yield from scanner.spaces()
            if (yield from scanner.looking_at(*self.closing)) if self.closing else "":
                break  # the invocation has no end tag
            if (yield from scanner.expect(f"<{self.parameter_tag} ", end)) == end:
                break
            yield from self._parameter(writer)
        writer.close()

    def _parameter(self, writer: ArgumentWriter) -> Step[None]:
        key = yield from read_attribute(self, "name")
        types = writer.types(key)
        yield from self.scanner.spaces()
        if (yield from self.scanner.peek()) == "s":
            is_string = (yield from read_attribute(self, "string")) == "true"
            types = schema.STRING if is_string else types - schema.STRING
            yield from self.scanner.spaces()
        yield from self.scanner.expect(">")
        yield from self.read_value(writer, key, types)

    def read_value(self, writer: ArgumentWriter, key: str, types: frozenset[str]) -> Step[None]:
        yield from self.value.read(self.scanner, writer, key, types)


class DeepSeekV32(InvokeBlocks):
    outer = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    closing = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    invoke_tag = "｜DSML｜invoke"
    parameter_tag = "｜DSML｜parameter"


class DeepSeekV41(InvokeBlocks):
    """The spaces in the tags belong to the format."""

    outer = ("<｜DSML｜ calls>",)
    closing = ("</｜DSML｜ calls>",)
    invoke_tag = "｜DSML｜ invoke"
    parameter_tag = "｜DSML｜ parameter"


class GigaChat35(InvokeBlocks):
    outer = ("<｜GCML｜tool_calls>",)
    closing = ("</｜GCML｜tool_calls>", "<|message_sep|>")
    invoke_tag = "｜GCML｜invoke"
    parameter_tag = "｜GCML｜parameter"
    stripped = ("<|message_sep|>",)


class MiniMaxM2(InvokeBlocks):
    outer = ("<minimax:tool_call>",)
    closing = ("</minimax:tool_call>",)


class Step3(InvokeBlocks):
    """``<｜tool_call_begin｜>function<｜tool_sep｜>`` precedes each invocation."""

    outer = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
    closing = ("<｜tool_call_end｜>", "<｜tool_calls_end｜>")
    invoke_tag = "steptml:invoke"
    parameter_tag = "steptml:parameter"


class Dots(InvokeBlocks):
    outer = ("<dots_function_call>",)
    closing = ("</dots_function_call>",)


class Muse(InvokeBlocks):
    outer = ("<atem:function_calls>",)
    closing = ("</atem:function_calls>",)
    invoke_tag = "atem:invoke"
    parameter_tag = "atem:parameter"
    stripped = (
        "<|start|>assistant to=user<|message|>",
        "<|start|>assistant to=self<|message|>",
        "to=user<|message|>",
        "to=self<|message|>",
        "to=functions<|message|>",
        " to=user<|message|>",
        " to=self<|message|>",
        " to=functions<|message|>",
        "<|eom|>",
        "<|eot|>",
    )


class MiniCpm5(InvokeBlocks):
    """``<function name="F"><param name="p">v</param></function>``; a value may be CDATA."""

    invoke_tag = "function"
    parameter_tag = "param"
    cdata = RawValue("]]></param>", "<param", "</function>")

    def read_value(self, writer: ArgumentWriter, key: str, types: frozenset[str]) -> Step[None]:
        is_cdata = yield from self.scanner.accept("<![CDATA[")
        value = self.cdata if is_cdata else self.value
        yield from value.read(self.scanner, writer, key, types)
