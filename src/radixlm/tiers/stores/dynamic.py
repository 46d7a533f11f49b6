"""A store of the operator's own class: --hicache-storage-backend dynamic."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import msgspec

from radixlm.base.errors import ConfigError
from radixlm.tiers.stores.base import FLAG, StoreOptions

METHODS = ("open", "exists", "get", "put", "delete", "clear", "stats", "close")


class DynamicOptions(StoreOptions, frozen=True):
    """``module_path``: as in an import; ``class_name``: called with ``options`` and the namespace;
    it has the methods of ``base.Store``. ``backend_name``: for reports."""

    module_path: str
    class_name: str
    backend_name: str = "dynamic"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class DynamicStore:
    """Makes the object of the class that the options name."""

    Options: ClassVar[type[StoreOptions]] = DynamicOptions

    def __new__(cls, options: DynamicOptions, namespace: str) -> Any:
        where = f"{options.module_path}:{options.class_name}"
        try:
            kind = getattr(importlib.import_module(options.module_path), options.class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{FLAG}: there is no class {where}: {error}") from error
        missing = [name for name in METHODS if not callable(getattr(kind, name, None))]
        if missing:
            raise ConfigError(f"{FLAG}: {where} lacks the methods {', '.join(missing)}")
        store = kind(options.options, namespace)
        store.medium = getattr(store, "medium", "EXTERNAL")
        return store
