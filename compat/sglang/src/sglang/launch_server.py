"""``python -m sglang.launch_server``: the server of RadixLM, with the same flags."""

import sys

from radixlm.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
