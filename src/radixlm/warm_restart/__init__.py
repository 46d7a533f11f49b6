"""What of the KV cache is whole after an engine has died."""
