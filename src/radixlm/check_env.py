"""``python -m radixlm.check_env``: SGLang's name for `radixlm check-env`."""

import sys

from radixlm.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main(["check-env", *sys.argv[1:]]))
