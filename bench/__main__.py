"""``python -m bench NAME [options]``; ``python -m bench`` lists the names."""

import sys

from bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
