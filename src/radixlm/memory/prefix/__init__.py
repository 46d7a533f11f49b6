"""Prefix caches: who owns which KV page once a request has computed it."""
