"""A model, the samples of each client, and the two apps made of them."""

import functools

from fastfact import data, models
from fastfact.flower import client_app, server_app

CLIENTS = 10
model = functools.partial(models.build, "resnet9", [1, 8, 8], 10, width=0.125)


@functools.cache
def everybody() -> list:
    """The digits as ten clients with labels of their own have them (Factorized-FL, permuted non-IID)."""
    return data.make_clients("digits", "permuted-non-iid", CLIENTS, seed=0)


def samples(client: int):
    """What a client has. On a machine of its own: `ff.Client(train=(x, y), test=(x, y))` of its files."""
    return everybody()[client]


server = server_app("factorized-fl-alpha", model, clients=CLIENTS, rounds=5)
client = client_app(model, samples)
