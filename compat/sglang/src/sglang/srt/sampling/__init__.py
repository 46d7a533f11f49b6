"""``sglang.srt.sampling``: the part that programs use."""
