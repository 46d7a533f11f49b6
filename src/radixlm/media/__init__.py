"""The media of prompts: their encoders run in steps, their outputs are kept."""
