"""What every test needs: layers take the same paths on every machine, and measure nothing."""

import os

os.environ["FASTFACT_CHOICE"] = "fixed"
