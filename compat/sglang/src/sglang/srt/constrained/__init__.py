"""What programs import from below ``sglang.srt``."""
