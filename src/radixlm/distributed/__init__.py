"""Ranks of one replica: who does what, and what they exchange."""
