"""`python -m blueprints`: the command line."""

import sys

from blueprints.cli import main

sys.exit(main())
