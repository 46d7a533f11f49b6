"""Executors of replicas of several ranks: plans on their way, pipeline stages, attention groups."""
