"""Media of a prompt: fetched within limits, read by the checkpoint's processor, placed."""
