"""Changes of the prefix cache as events for others, over ZMQ."""
