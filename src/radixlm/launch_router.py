"""``python -m radixlm.launch_router``: the name that users of sglang-router know."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))
