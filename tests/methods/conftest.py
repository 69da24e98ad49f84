import math

import pytest

from fastfact.federation.client import step


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch):
    """Steps run as they are: when a capture pays is a matter of time. `test_every_method` captures some."""
    monkeypatch.setattr(step, "PATIENCE", math.inf)
