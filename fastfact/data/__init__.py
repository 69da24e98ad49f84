"""Data sets by name, and the ways to spread one over clients.

Imports nothing of the package. Read `scenarios.py` first.
"""

from fastfact.data.augment import Augment, color_jitter, random_flip, random_resized_crop, random_shift
from fastfact.data.client import Client
from fastfact.data.datasets import DATASETS, Dataset, load
from fastfact.data.samples import pad
from fastfact.data.scenarios import SCENARIOS, groups_of, label_permutation, make_clients
from fastfact.data.simulation import Simulation, fedfac_simulation

__all__ = [
    "DATASETS",
    "SCENARIOS",
    "Augment",
    "Client",
    "Dataset",
    "Simulation",
    "color_jitter",
    "fedfac_simulation",
    "groups_of",
    "label_permutation",
    "load",
    "make_clients",
    "pad",
    "random_flip",
    "random_resized_crop",
    "random_shift",
]
