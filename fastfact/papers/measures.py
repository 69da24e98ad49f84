"""The numbers of the papers' tables, each read off a finished run."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastfact.experiment import probes
from fastfact.experiment.report import Cell
from fastfact.federation.storage import run_directory

Clients = tuple[int, ...] | None
"""Which clients a number is of, from 0; None for all."""


@dataclass(frozen=True)
class Measure:
    """of(cell, clients) → the number, or None where the run has none. unit: behind the number. record: what the run has
    to keep for it. share: a fraction, shown as the paper shows its accuracies."""

    of: Callable[[Cell, Clients], float | None]
    unit: str = ""
    record: str = ""
    share: bool = False


def accuracies(cell: Cell, key: str = "accuracy") -> np.ndarray:
    """[rounds, clients]; a client that took no part keeps its last value, nan before its first."""
    rounds, clients = cell.result["config"]["rounds"], max(row["client"] for row in cell.rows) + 1
    made = np.full((rounds, clients), np.nan)
    for row in cell.rows:
        if row.get(key) is not None:
            made[row["round"] - 1, row["client"]] = row[key]
    for after in range(1, rounds):
        missing = np.isnan(made[after])
        made[after, missing] = made[after - 1, missing]
    return made


def _pick(values: np.ndarray, clients: Clients) -> np.ndarray:
    return values if clients is None else values[..., [k for k in clients if k < values.shape[-1]]]


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def last_accuracy(cell: Cell, clients: Clients) -> float | None:
    """Mean over clients after the last round."""
    return _mean(_pick(accuracies(cell), clients)[-1])


def as_downloaded(cell: Cell, clients: Clients) -> float | None:
    """The same after the last download, before local training; of a method without one its last accuracy."""
    found = _mean(_pick(accuracies(cell, "accuracy_before"), clients)[-1])
    return last_accuracy(cell, clients) if found is None else found


def best_accuracy(cell: Cell, clients: Clients) -> float | None:
    """The best mean over clients of any round (FedDecomp §4.1)."""
    means = [_mean(row) for row in _pick(accuracies(cell), clients)]
    return max((mean for mean in means if mean is not None), default=None)


def best_of_ten(cell: Cell, clients: Clients) -> float | None:
    """The best mean over ten consecutive rounds, clients weighted by their samples (FedFac §5.2)."""
    values = accuracies(cell)
    sizes = np.array([sum(pair) for pair in run_directory.read_config(cell.directory)["samples"]], dtype=float)
    sizes = sizes[: values.shape[1]] * np.ones_like(values)
    sizes[np.isnan(values)] = 0
    means = (np.nan_to_num(values) * sizes).sum(1) / sizes.sum(1)
    window = min(10, len(means))
    return float(np.convolve(means, np.ones(window) / window, "valid").max())


def _summary(key: str, scale: float = 1.0) -> Callable[[Cell, Clients], float | None]:
    def of(cell: Cell, clients: Clients) -> float | None:
        value = cell.result["summary"].get(key)
        return None if value is None else value / scale

    return of


def _recorded(name: str) -> Callable[[Cell, Clients], float | None]:
    """A number that was recorded last."""

    def of(cell: Cell, clients: Clients) -> float | None:
        rounds = probes.read(cell.directory).get(name, {})
        return float(rounds[max(rounds)]) if rounds else None

    return of


def groups(cell: Cell) -> np.ndarray:
    """The domain of each client: there are five, but where every client has its own superclass."""
    config = cell.result["config"]
    return np.arange(config["clients"]) // max(1, config["clients"] // 5)


def _joined(how: str) -> Callable[[Cell, Clients], float | None]:
    """Accuracy of clients that joined at the end."""
    return lambda cell, clients: cell.result.get("newcomers", {}).get(how)


def _leaked(reduce: Callable) -> Callable[[Cell, Clients], float | None]:
    """PSNR over all rounds, clients and images of what an attacker made (FedDecomp, Table 7)."""

    def of(cell: Cell, clients: Clients) -> float | None:
        rounds = probes.read(cell.directory).get("leaks/psnr", {})
        return float(reduce(np.concatenate(list(rounds.values())))) if rounds else None

    return of


def _similar(name: str, same: bool | None) -> Callable[[Cell, Clients], float | None]:
    """Mean cosine at the end with the other clients: of all, of the `same` domain or of other ones."""

    def of(cell: Cell, clients: Clients) -> float | None:
        rounds = probes.read(cell.directory).get(f"similarity/{name}", {})
        if not rounds:
            return None
        matrix, group = rounds[max(rounds)], groups(cell)
        wanted = ~np.eye(len(matrix), dtype=bool)
        if same is not None:
            wanted &= (group[:, None] == group) == same
        return _mean(matrix[wanted])

    return of


def frequency(cell: Cell) -> np.ndarray | None:
    """How often each client mixed another in, as a share of the rounds [K, K]."""
    rounds = probes.read(cell.directory).get("matching/weights", {})
    if not rounds:
        return None
    return np.mean([matrix > 1e-6 for matrix in rounds.values()], axis=0)


def _matched_within(cell: Cell, clients: Clients) -> float | None:
    """Of the weight that went to other clients, the share that went to the same domain."""
    rounds = probes.read(cell.directory).get("matching/weights", {})
    if not rounds:
        return None
    total, group = sum(rounds.values()), groups(cell)
    others = ~np.eye(len(total), dtype=bool)
    weight = float(total[others].sum())
    return float(total[others & (group[:, None] == group)].sum()) / weight if weight else None


def stability(cell: Cell) -> np.ndarray:
    """The share of channels that did not change sides from each round to the next (FedFac, Figure 7)."""
    rounds = probes.read(cell.directory).get("split/shared", {})
    masks = [rounds[number] for number in sorted(rounds)]
    return np.array([(a == b).mean() for a, b in itertools.pairwise(masks)])


def _stable(cell: Cell, clients: Clients) -> float | None:
    shares = stability(cell)
    return float(shares[-1]) if len(shares) else None


def _distance(name: str) -> Callable[[Cell, Clients], float | None]:
    """How far the clients' updates are from those of client 1, at the end."""

    def of(cell: Cell, clients: Clients) -> float | None:
        rounds = probes.read(cell.directory).get(f"updates/{name}", {})
        return _mean(_pick(rounds[max(rounds)], clients)) if rounds else None

    return of


def _loss(cell: Cell, clients: Clients) -> float | None:
    values = [row["loss"] for row in cell.rows if row["round"] == cell.result["config"]["rounds"]]
    return _mean(np.array([value for value in values if value is not None]))


def _spread(cell: Cell, clients: Clients) -> float | None:
    """Standard deviation over clients of the accuracy after the last round."""
    return float(np.nanstd(accuracies(cell)[-1]))


def entropy(outputs: np.ndarray, neighbours: int = 3) -> np.ndarray:
    """The k-nearest-neighbour estimate of the entropy of each unit's output over clients, of outputs [K, units].

    H = ψ(K) − ψ(k) + ln 2 + mean ln ε, ε the distance to the k-th neighbour (Kozachenko and Leonenko). Units whose
    output is the same for most clients have −∞, given as nan.
    """
    count = len(outputs)
    distances = np.sort(np.abs(outputs[:, None] - outputs[None]), axis=0)[neighbours]
    with np.errstate(divide="ignore"):
        logs = np.log(distances).mean(0)
    harmonic = sum(1 / n for n in range(neighbours, count))
    made = harmonic + np.log(2) + logs
    return np.where(np.isfinite(made), made, np.nan)


def _entropy(cell: Cell, clients: Clients) -> float | None:
    rounds = probes.read(cell.directory).get("neurons/output", {})
    if not rounds:
        return None
    outputs = rounds[max(rounds)]
    return _mean(entropy(outputs / max(float(outputs.std()), 1e-12)))


MEASURES = {
    "accuracy": Measure(last_accuracy, share=True),
    "best": Measure(best_accuracy, share=True),
    "best-of-ten": Measure(best_of_ten, share=True),
    "downloaded": Measure(as_downloaded, share=True),
    "client-std": Measure(_spread, share=True),
    "loss": Measure(_loss),
    "cost": Measure(_summary("formula", 1e9), "GB"),
    "parameters": Measure(_summary("parameters", 1e6), "M"),
    "seconds": Measure(_summary("seconds"), "s"),
    "u-others": Measure(_similar("u", None), record="similarity"),
    "v-within": Measure(_similar("v", True), record="similarity"),
    "v-between": Measure(_similar("v", False), record="similarity"),
    "key-others": Measure(_similar("key", None), record="similarity"),
    "matched-within": Measure(_matched_within, record="matching"),
    "drift": Measure(_recorded("drift/distance"), record="drift"),
    "moved-shared": Measure(_recorded("movement/shared"), record="movement"),
    "moved-personal": Measure(_recorded("movement/personal"), record="movement"),
    "masked-shared": Measure(_recorded("masked/shared"), record="masked", share=True),
    "masked-personal": Measure(_recorded("masked/personal"), record="masked", share=True),
    "new-download": Measure(_joined("download"), share=True),
    "new-fine-tune": Measure(_joined("fine-tune"), share=True),
    "new-local-train": Measure(_joined("local-train"), share=True),
    "new-ensemble": Measure(_joined("ensemble"), share=True),
    "psnr": Measure(_leaked(np.mean), "dB", record="leaks"),
    "psnr-most": Measure(_leaked(np.max), "dB", record="leaks"),
    "stable": Measure(_stable, record="split", share=True),
    "distance": Measure(_distance("weight"), record="updates"),
    "distance-u": Measure(_distance("u"), record="updates"),
    "distance-v": Measure(_distance("v"), record="updates"),
    "entropy": Measure(_entropy, record="neurons"),
}
