"""`python -m specjax` is the `specjax` command.

Python imports the package, and JAX with it, before it runs this file. An interruption in that
second ends in the traceback of Python or of a library. The `specjax` script has none.
"""

import sys

from specjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
