"""Weights that change while a server runs, and memory that it gives back meanwhile."""
