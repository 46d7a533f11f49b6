"""Triton's interpreter, without work that it repeats.

It replaces the functions of `triton.language` by its own at each launch, and again at each call of
a device function (`tl.sum` and `tl.cdiv` are such), which takes most of the time of a small kernel.
"""

from __future__ import annotations

import sys
import threading
from typing import Any


def replace_language_once_a_launch() -> None:
    """Let calls of device functions keep what the launch, or a call before, has replaced. Does
    nothing if no kernel of this process is interpreted."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "_replaced"):
        return
    replaced: set[str] = set()  # modules of functions, in this launch
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    nothing = interpreter._LangPatchScope()
    one_at_a_time = threading.Lock()

    def replace_once(fn: Any) -> Any:
        if fn.__module__ in replaced:
            return nothing
        replaced.add(fn.__module__)
        return replace(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        with one_at_a_time:  # ranks may be threads
            replaced.clear()
            try:
                launch(self, *args, **kwargs)
            finally:
                replaced.clear()

    interpreter._replaced = replaced
    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew
