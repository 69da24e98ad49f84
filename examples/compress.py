"""Accuracy over size of a convolutional network on the handwritten digits: a table, and a picture in the folder given.

python examples/compress.py runs/compress
"""

import copy
import sys
import warnings
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import nn

import fastfact as ff


def digits() -> tuple[list, list]:
    """Batches of 64 to train on, of 512 to test on: 1,347 and 450 images [1, 8, 8]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(x) * 3 // 4], order[len(x) * 3 // 4 :]
    return [(x[part], y[part]) for part in train.split(64)], [(x[part], y[part]) for part in test.split(512)]


def network() -> nn.Sequential:
    def block(i, o):
        return nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()

    blocks = (*block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def trained(train: list, epochs: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main(folder: Path) -> None:
    warnings.simplefilter("ignore", UserWarning)
    train, test = digits()
    dense = trained(train)
    numbers = sum(p.numel() for p in dense.parameters())
    print(f"{'target':>22} {'parameters':>10}   dense     cut  trained")
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    for what, shares in (
        ("target_density", (0.5, 0.2, 0.1, 0.05, 0.02)),
        ("target_params", (0.5, 0.3, 0.2, 0.1, 0.05)),
    ):
        points = []
        for share in shares:
            target = share if what == "target_density" else round(share * numbers)
            done = ff.compress(copy.deepcopy(dense), train, **{what: target}, epochs=10, evaluate=test)
            steps = "  ".join(f"{value:6.1%}" for value in (done.accuracy_dense, done.accuracy_cut, done.accuracy))
            print(f"{what:>15} {share:6.0%} {done.parameters:10,}  {steps}", flush=True)
            points.append((done.parameters / numbers, done.accuracy_cut, done.accuracy))
        size, cut, after = zip(*points, strict=True)
        (line,) = axes.plot(size, after, "o-", label=f"{what}, trained")
        axes.plot(size, cut, "o:", color=line.get_color(), label=f"{what}, cut only")
    axes.axhline(done.accuracy_dense, color="grey", lw=1, label="dense")
    axes.set(xscale="log", xlabel="parameters / dense", ylabel="accuracy")
    axes.legend(fontsize=7)
    figure.savefig(folder / "compress.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/compress"))
