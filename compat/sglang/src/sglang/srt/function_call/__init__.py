"""``sglang.srt.function_call``: the part that programs use."""
