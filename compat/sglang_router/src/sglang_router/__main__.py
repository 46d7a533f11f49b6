"""``python -m sglang_router``."""

from sglang_router.cli import main

if __name__ == "__main__":
    main()
