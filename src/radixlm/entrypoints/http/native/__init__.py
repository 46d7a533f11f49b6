"""The routes of the native API, over ``entrypoints/native``."""
