"""`python -m mlaplan`."""

import sys

from mlaplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
