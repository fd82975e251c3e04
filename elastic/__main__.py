"""`python -m elastic` is the `elastic` command."""

import sys

from elastic.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
