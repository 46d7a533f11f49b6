"""``sglang.srt.managers``: the part that programs use."""
