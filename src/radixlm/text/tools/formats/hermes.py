"""``<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>``: Hermes, Qwen 2.5 and 3."""

from radixlm.text.tools.json_calls import JsonBlocks


class Hermes(JsonBlocks):
    starts = ("<tool_call>",)
    ends = ("</tool_call>",)


class Trinity(Hermes):
    """Calls may occur inside the reasoning, whose tags are removed."""

    stripped = ("<think>", "</think>")
