"""``[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`` and ``[TOOL_CALLS]f[ARGS]{...}``: Mistral.

Tokenizers of version 11 and later write the compact form, with ``[CALL_ID]`` in some.
"""

from __future__ import annotations

from radixlm.text.tools.json_calls import JsonBlocks
from radixlm.text.tools.scan import Step


class Mistral(JsonBlocks):
    starts = ("[TOOL_CALLS]",)

    def block(self, marker: str) -> Step[None]:
        yield from self.scanner.spaces()
        if (yield from self.scanner.peek()) in ("[", "{"):
            yield from super().block(marker)
        else:
            yield from self._compact()

    def _compact(self) -> Step[None]:
        name = yield from self.name()
        found = yield from self.scanner.accept("[CALL_ID]", "[ARGS]")
        if found == "[CALL_ID]":
            yield from self.name()
            yield from self.scanner.accept("[ARGS]")
        yield from self.json_arguments(name)
