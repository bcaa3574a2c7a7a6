"""Entry point of `python -m braid`."""

import sys

from braid.cli import main

sys.exit(main())
