"""Small models and clients for the tests: float64, a few samples, models of a few hundred numbers."""

import torch
from torch import nn

import fastfact as ff


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def cnn() -> nn.Module:
    """Batch-norm, a convolution, and a classifier that is not the first to run out of samples."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1, stride=2),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    ).double()


def make_clients(shape=(6,), sizes=(10, 7, 12), classes=3, test=5, seed=0) -> list[ff.Client]:
    g = torch.Generator().manual_seed(seed)
    clients = []
    for n in sizes:
        x = torch.randn(n + test, *shape, generator=g, dtype=torch.float64)
        y = torch.randint(classes, (n + test,), generator=g)
        clients.append(ff.Client(train=(x[:n], y[:n]), test=(x[n:], y[n:])))
    return clients


class Scale(nn.Module):
    """A temperature: scalars, one that trains and one in the place of which the forward puts another."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0.5))

    def forward(self, x):
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.abs().mean()
        return x * self.scale / (1 + self.seen.detach())
