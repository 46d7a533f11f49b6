"""Traces of /start_profile as downloads, for the page at /ui."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from radixlm.base import env
from radixlm.base.errors import NotFound

router = APIRouter(tags=["admin"])

_NAME: Final = re.compile(r"[\w.-]{1,255}\.trace\.json\.gz", re.ASCII)


@router.get("/live/profiles/{name}")
def profile(name: str) -> Response:
    """The trace of this name in RADIXLM_PROFILER_DIR, once it is written whole."""
    path = env.PROFILER_DIR.get() / name
    if not _NAME.fullmatch(name) or path.is_symlink() or not path.is_file() or not _is_whole(path):
        raise NotFound(f"there is no trace {name!r:.300} in {path.parent}, or not yet")
    return FileResponse(path, media_type="application/gzip", filename=name)


def _is_whole(path: Path) -> bool:
    """Whether the file is written to its end."""
    try:
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error):
        return False
    return True
