"""Options of the processor: those of a request (``mm_processor_kwargs``), and the server's."""

from collections.abc import Mapping
from typing import Any

from radixlm.base.env import IMAGE_MAX_PIXELS
from radixlm.base.errors import ConfigError, InvalidRequest
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


def bound_pixels(processor: Any, processing: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the processors of images and videos the server's bounds (``--mm-process-config``);
    ConfigError for one that has none."""
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    for kind, options in processing.items():
        given = {edge: options[name] for name, edge in edges.items() if name in options}
        if not given:
            continue
        size = getattr(getattr(processor, f"{kind}_processor", None), "size", None)
        if size is None or not all(size.get(edge) for edge in edges.values()):
            raise ConfigError(
                f"--mm-process-config {kind}: the {kind}s of this model have no bounds in pixels"
            )
        for edge, pixels in given.items():  # pixels, in spite of its name
            size[edge] = pixels
        if size["shortest_edge"] > size["longest_edge"]:
            raise ConfigError(
                f"--mm-process-config {kind}: the model's bounds are {size['shortest_edge']} to "
                f"{size['longest_edge']} pixels then; give min_pixels and max_pixels"
            )


def _known(processor: Any) -> list[str]:
    """Those of ``_OPTIONS`` that the image processor has."""
    kind = type(getattr(processor, "image_processor", None))
    taken = getattr(getattr(kind, "valid_kwargs", None), "__annotations__", {})
    return [name for name in _OPTIONS if name in taken]
