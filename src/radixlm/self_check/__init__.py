"""Whether each page, slot and lock of the KV cache has one owner, looked at while nothing runs."""
