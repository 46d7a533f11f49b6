"""Hosts in URLs."""


def url_host(host: str) -> str:
    """A name or address as URLs have it: IPv6 in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
