"""Federated learning over stacked client states: see `Federation`, `Client` and `Strategy`.

Besides what one runs, it exports what a method's page is written with: `Strategy`, `register`, `Phase`, `TensorInfo`,
`Uploads` and `mixing`.

`client/` trains, `server/` mixes, `wire/` counts the bytes between them, `storage/` keeps states and runs. Imports
`nn`, `ops` and what stands below them. Read `federation.py` first.
"""

from fastfact.data.client import Client
from fastfact.federation.callbacks import Callback, TensorBoard
from fastfact.federation.client.data import LazyClients
from fastfact.federation.client.phase import Phase
from fastfact.federation.federation import Federation
from fastfact.federation.history import History
from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.storage.run_directory import RunDirectoryError
from fastfact.federation.tensors import TensorInfo
from fastfact.federation.wire.ledger import Ledger

__all__ = [
    "Callback",
    "Client",
    "Federation",
    "History",
    "LazyClients",
    "Ledger",
    "Phase",
    "RunDirectoryError",
    "Strategy",
    "TensorBoard",
    "TensorInfo",
    "Uploads",
    "mixing",
    "register",
]
