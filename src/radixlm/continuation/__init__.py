"""Requests that go on from earlier ones."""
