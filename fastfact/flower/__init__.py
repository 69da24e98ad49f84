"""A federation over several machines, by Flower: `server_app` and `client_app` make its apps of any method.

`server.py` and `node.py` are the two sides, which know bytes and not Flower; `apps.py` puts them into Flower's apps.
Imports `federation` and what stands below it; `apps.py` alone imports Flower, the extra `flower`. Read `packet.py`
first, then `server.py`.
"""

from typing import TYPE_CHECKING, Any

from fastfact.flower.node import Node
from fastfact.flower.server import Server

if TYPE_CHECKING:
    from fastfact.flower.apps import client_app, server_app

__all__ = ["Node", "Server", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    if name not in ("client_app", "server_app"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from fastfact.flower import apps
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ModuleNotFoundError(
            "fastfact.flower's apps need Flower, which is not installed: pip install 'fastfact[flower]'", name="flwr"
        ) from None
    return getattr(apps, name)
