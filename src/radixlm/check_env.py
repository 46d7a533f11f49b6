"""``python -m radixlm.check_env``: SGLang's name for `radixlm check-env`."""

import sys

from radixlm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["check-env", *sys.argv[1:]]))
