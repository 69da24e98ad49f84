"""What every test needs: layers take the same paths on every machine, and measure nothing."""

import os

os.environ["FASTFACT_CHOICE"] = "fixed"

LONG = (
    *("crash", "bench", "packaging", "processes", "gpu_check", "reproduce", "cli", "every_method", "architectures"),
    *("matching", "run_directory", "ops_cpu"),
)
"""Files that take longest. A process takes a file at a time: one of these, begun last, would keep the other waiting."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
