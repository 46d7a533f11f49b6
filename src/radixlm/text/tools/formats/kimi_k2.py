"""``<|tool_call_begin|>functions.NAME:IDX<|tool_call_argument_begin|>{...}``: Kimi K2."""

from radixlm.text.tools.formats.deepseek_v3 import SectionBlocks
from radixlm.text.tools.scan import Malformed, Step


class KimiK2(SectionBlocks):
    """The model writes the call's id, and its template expects the same id again."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    brackets = ("<|tool_call_begin|>", "<|tool_call_end|>")
    starts = (section[0], brackets[0])

    def read_call(self) -> Step[None]:
        yield from self.scanner.spaces()
        call_id = yield from self.read_name()
        yield from self.scanner.spaces()
        yield from self.scanner.expect("<|tool_call_argument_begin|>")
        head, colon, index = call_id.rpartition(":")
        is_numbered = bool(colon) and index.isdecimal()
        name = (head if is_numbered else call_id).removeprefix("functions.")
        if not name:
            raise Malformed
        yield from self.read_json_arguments(name, call_id if is_numbered else None)
