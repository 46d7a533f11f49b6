"""``sglang.srt.utils``, whose functions live here in SGLang."""

from sglang.srt.utils import *  # noqa: F403
