"""Host bookkeeping of the KV cache, in numbers only: pages, slots, prefixes, their invariants."""
