"""Images and videos of a program as base64."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

VIDEO = "video:"


def encode_image(path: Any) -> str:
    """An image: the bytes of a file, or given ones; a PIL image as PNG."""
    if isinstance(path, bytes):
        data = path
    elif hasattr(path, "save"):
        buffer = BytesIO()
        path.save(buffer, format="PNG")
        data = buffer.getvalue()
    else:
        data = Path(path).read_bytes()
    return base64.b64encode(data).decode()


def encode_video(path: str) -> str:
    """A video's file behind "video:"."""
    return VIDEO + encode_image(path)
