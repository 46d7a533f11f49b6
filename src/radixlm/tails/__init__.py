"""Prefix hits that count tokens, not only whole pages."""
