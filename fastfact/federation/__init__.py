"""Federated learning over stacked client states: see `Federation`, `Client` and `Strategy`."""

from fastfact.federation.client import Client, LazyClients
from fastfact.federation.cohort import TensorInfo
from fastfact.federation.history import History
from fastfact.federation.loop import Federation
from fastfact.federation.store import RunDirectoryError
from fastfact.federation.strategy import Phase, Strategy, Uploads
from fastfact.federation.wire import Ledger

__all__ = [
    "Client",
    "Federation",
    "History",
    "LazyClients",
    "Ledger",
    "Phase",
    "RunDirectoryError",
    "Strategy",
    "TensorInfo",
    "Uploads",
]
