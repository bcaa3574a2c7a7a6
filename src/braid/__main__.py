"""`python -m braid` is the command `braid`."""

import sys

from braid.cli import main

sys.exit(main())
