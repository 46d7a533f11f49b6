"""``python -m radixlm.launch_server``: the name that users of SGLang know."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
