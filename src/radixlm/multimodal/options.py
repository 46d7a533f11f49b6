"""Options of the processor: those of a request (``mm_processor_kwargs``), and the server's."""

from collections.abc import Mapping
from typing import Any

from radixlm.base.env import IMAGE_MAX_PIXELS
from radixlm.base.errors import InvalidRequest
from radixlm.multimodal.image import MAX_PIXELS

# They bound the size of images. Others would change the shapes that the encoder was built for.
_OPTIONS = ("min_pixels", "max_pixels")


def checked_options(processor: Any, options: Mapping[str, Any] | None) -> dict[str, int]:
    """InvalidRequest for an option that the image processor does not know, and for a value out of
    bounds. ``max_pixels`` is the server's limit at most."""
    known = _known(processor)
    for name, value in (options or {}).items():
        where = f"mm_processor_kwargs.{name!s:.40}"
        if name not in known:
            may = " and ".join(known) or "none"
            raise InvalidRequest(f"{where}: requests to this model may set {may}", where)
        if type(value) is not int or not 1 <= value <= MAX_PIXELS:
            raise InvalidRequest(f"{where} must be an integer in [1, {MAX_PIXELS}]", where)
    limit = IMAGE_MAX_PIXELS.get() or MAX_PIXELS
    return {n: min(v, limit) if n == "max_pixels" else v for n, v in (options or {}).items()}


def limit_pixels(processor: Any) -> None:
    """Let the image processor make images of IMAGE_MAX_PIXELS pixels at most, if it has a bound."""
    limit = IMAGE_MAX_PIXELS.get()
    if limit and "max_pixels" in _known(processor):
        size = processor.image_processor.size
        if size["longest_edge"]:  # pixels, in spite of its name
            size["longest_edge"] = min(size["longest_edge"], limit)


def _known(processor: Any) -> list[str]:
    """Those of ``_OPTIONS`` that the image processor has."""
    kind = type(getattr(processor, "image_processor", None))
    taken = getattr(getattr(kind, "valid_kwargs", None), "__annotations__", {})
    return [name for name in _OPTIONS if name in taken]
