"""The names that SGLang's tests take from ``sglang.srt.utils``."""

import os
import signal
import time


def get_device() -> str:
    """The device on which the server runs."""
    return "cpu"


def kill_process_tree(pid: int, *_: object, **__: object) -> None:
    """End a server that ``popen_launch_server`` started, with its process group."""
    for sent, wait_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, sent)
            until_s = time.monotonic() + wait_s
            while time.monotonic() < until_s:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.05)
        except (ProcessLookupError, ChildProcessError):
            return


kill_child_process = kill_process_tree
