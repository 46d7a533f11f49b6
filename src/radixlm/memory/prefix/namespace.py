"""CacheNamespace: all that KV depends on besides the token ids before it."""

from __future__ import annotations

from radixlm.base.record import Record


class CacheNamespace(Record):
    """Two prompts share cached pages only in equal namespaces. Fields are compared one by one and
    never joined to one text, so that no value of a field can pass for those of two.

    Media are named in the token ids of their placeholders. ``earlier_media`` names those that
    tokens before them attend to, since such tokens have no other trace of them.
    """

    weights_version: str = ""
    kv_layout: str = ""  # dtype of the KV cache and page size
    adapter: str | None = None
    tenant: str | None = None  # of --isolate-cache-by: the hash of the client's key
    cache_salt: str | None = None  # sent by the client
    extra_key: str | None = None  # sent by the client
    rope_variant: str | None = None  # where a rope depends on the prompt's length
    earlier_media: tuple[bytes, ...] = ()  # SHA-256 of each
