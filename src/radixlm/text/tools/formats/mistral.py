"""``[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`` and ``[TOOL_CALLS]f[ARGS]{...}``: Mistral.

Tokenizers of version 11 and later write the compact form, some with ``[CALL_ID]``.
"""

from radixlm.text.tools.json_calls import JsonBlocks
from radixlm.text.tools.scan import Step


class Mistral(JsonBlocks):
    starts = ("[TOOL_CALLS]",)

    def read_block(self, marker: str) -> Step[None]:
        yield from self.scanner.spaces()
        if (yield from self.scanner.peek()) in ("[", "{"):
            yield from super().read_block(marker)
        else:
            yield from self._compact()

    def _compact(self) -> Step[None]:
        name = yield from self.read_name()
        found = yield from self.scanner.accept("[CALL_ID]", "[ARGS]")
        if found == "[CALL_ID]":
            yield from self.read_name()
            yield from self.scanner.accept("[ARGS]")
        yield from self.read_json_arguments(name)
