"""``sglang.srt.parser``: the part that programs use."""
