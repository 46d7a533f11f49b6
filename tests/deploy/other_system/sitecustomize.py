"""For every process with this folder on PYTHONPATH: what Linux alone has is not there, as radixlm
sees it (calls of os, /proc, /sys, /dev/shm), nor are the C++ kernels."""

from __future__ import annotations

import os
import sys

for name in (
    "sched_getaffinity",
    "sched_setaffinity",
    "memfd_create",
    "pidfd_open",
    "posix_fadvise",
    "posix_fallocate",
    "eventfd",
    "splice",
    "copy_file_range",
):
    if hasattr(os, name):
        delattr(os, name)
LIBRARY = os.path.dirname(os.__file__)


def is_library(file):
    return file.startswith(("<", LIBRARY)) and "site-packages" not in file


def is_refused(path):
    if not str(path).startswith(("/proc", "/sys/", "/dev/shm")):
        return False
    frame = sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and "/radixlm/" in frame.f_code.co_filename


def hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and is_refused(args[0]):
        raise FileNotFoundError(2, "no such file", str(args[0]))


def stat(path, *args, found=os.stat, **options):
    if is_refused(path):
        raise FileNotFoundError(2, "no such file", str(path))
    return found(path, *args, **options)


os.stat = stat
sys.addaudithook(hook)
sys.modules["radixlm._cpu"] = None
