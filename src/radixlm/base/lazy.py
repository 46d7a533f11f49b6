"""Optional packages, imported when first used, with an error that says how to get them."""

import importlib
import threading
from types import ModuleType
from typing import Any

from radixlm.base.errors import ConfigError

# transformers replaces methods of its base class while it makes a model, then puts back what it
# found: two threads at once could leave them replaced for good
transformers_loading = threading.RLock()


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import ``module``; ConfigError with "pip install 'radixlm[extra]'" if absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{why} needs the package {module.partition('.')[0]!r}: "
            f"pip install 'radixlm[{extra}]' ({error})"
        ) from error


def require_transformers(extra: str, why: str) -> Any:
    """The package transformers without its notes and progress bars: one bar tells of weights. It
    refuses code that comes with a checkpoint; else it would ask the terminal whether to run it."""
    library: Any = require("transformers", extra, why)
    remote_code: Any = importlib.import_module("transformers.dynamic_module_utils")
    remote_code.TIME_OUT_REMOTE_CODE = 0
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def load(target: str) -> Any:
    """Import and return the object "module:attr", for modules that must not be imported early."""
    module, _, attr = target.partition(":")
    return getattr(importlib.import_module(module), attr)
