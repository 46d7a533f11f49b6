"""A discrete-event simulator of clusters of engines (docs/scale.md)."""
