"""Devices: their streams and events, and copies between them and the host."""
