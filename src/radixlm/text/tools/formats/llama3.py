"""``<|python_tag|>{"name": "f", "parameters": {...}}; {...}`` (the tag may be missing): Llama 3."""

from radixlm.text.tools.json_calls import JsonBlocks


class Llama3(JsonBlocks):
    starts = ("<|python_tag|>",)
    stripped = ("<|eom_id|>", "<|eot_id|>")
    bare_starts = "{"


class BareJson(JsonBlocks):
    """``[{"name": "f", "parameters": {...}}]``: a forced call of most formats."""

    bare_starts = "[{"
