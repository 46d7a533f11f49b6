"""Drafters on the device: draft models, and heads that read the target's hidden states."""
