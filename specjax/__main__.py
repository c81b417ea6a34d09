"""`python -m specjax` is the `specjax` command.

Python imports the package, and JAX with it, before it runs this file: an interruption in that
second ends in Python's own traceback, or in one of a library's. The `specjax` script has none.
"""

import sys

from specjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
