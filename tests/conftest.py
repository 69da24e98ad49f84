"""What every test needs: the cost model takes the same paths on every machine, and measures nothing."""

import os

os.environ["FASTFACT_COST"] = "builtin"
