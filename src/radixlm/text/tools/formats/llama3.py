"""``<|python_tag|>{"name": "f", "parameters": {...}}; {...}``, the tag often missing: Llama 3."""

from __future__ import annotations

from radixlm.text.tools.json_calls import JsonBlocks


class Llama3(JsonBlocks):
    starts = ("<|python_tag|>",)
    silent = ("<|eom_id|>", "<|eot_id|>")
    bare = "{"


class BareJson(JsonBlocks):
    """``[{"name": "f", "parameters": {...}}]``: what a forced call looks like in most formats."""

    bare = "[{"
