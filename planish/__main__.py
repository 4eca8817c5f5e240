"""`python -m planish` is the command `planish`."""

import sys

from planish.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
