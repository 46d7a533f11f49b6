"""``sglang.srt.entrypoints.openai``: the part that programs use."""
