"""``sglang.srt.entrypoints``: the part that programs use."""
