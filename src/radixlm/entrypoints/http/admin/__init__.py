"""Routes for operators: health, information, metrics, control, logs of requests."""
