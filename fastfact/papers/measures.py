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

Of = Callable[[Cell, Clients, str], float | None]


MOMENTS = {
    "trained": "after local training",
    "downloaded": "after aggregation, as downloaded, before local training",
}
"""When the accuracies of a round are taken. A method that mixes nothing has no download: its clients are measured after
their training at either moment."""


@dataclass(frozen=True)
class Measure:
    """of(cell, clients, moment) → the number, or None where the run has none.

    when: the moment it is taken, in words; {} stands for that of the recipe (see `MOMENTS`). unit: behind the number.
    record: what the run has to keep for it. share: a fraction, shown as the paper shows its accuracies.
    """

    of: Callable[[Cell, Clients, str], float | None]
    when: str
    unit: str = ""
    record: str = ""
    share: bool = False

    def taken(self, moment: str) -> str:
        """When it is taken in a recipe of that moment."""
        return self.when.format(MOMENTS[moment])


def accuracies(cell: Cell, moment: str = "trained") -> np.ndarray:
    """[rounds, clients] of a moment of `MOMENTS`; nan for a client that took no part.

    The row of a round as downloaded is what came of its aggregation: the clients of the next round are measured with
    it, after the last round all of them.
    """
    clients = max(row["client"] for row in cell.rows) + 1
    after = cell.result.get("downloaded")
    if moment == "downloaded" and (after or any(row.get("accuracy_before") is not None for row in cell.rows)):
        values = _by_round(cell, "accuracy_before", clients)
        last = np.full((1, clients), np.nan) if after is None else np.array([after], dtype=float)
        return np.concatenate([values[1:], last])
    return _by_round(cell, "accuracy", clients)


def _by_round(cell: Cell, key: str, clients: int) -> np.ndarray:
    values = np.full((cell.result["config"]["rounds"], clients), np.nan)
    for row in cell.rows:
        if row.get(key) is not None:
            values[row["round"] - 1, row["client"]] = row[key]
    return values


def last_accuracies(cell: Cell, moment: str = "trained") -> np.ndarray:
    """[clients]: of each client the newest there is. As downloaded that is after the last aggregation for all; after
    training it is when a client was last trained, which may be some rounds ago."""
    values = accuracies(cell, moment)
    last = np.full(values.shape[1], np.nan)
    for row in values:
        last = np.where(np.isnan(row), last, row)
    return last


def curve(cell: Cell, moment: str) -> np.ndarray:
    """The mean over the clients measured in each round [rounds]; rounds in which there were none are left out."""
    values = accuracies(cell, moment)
    return np.array([row[np.isfinite(row)].mean() for row in values if np.isfinite(row).any()])


def _pick(values: np.ndarray, clients: Clients) -> np.ndarray:
    return values if clients is None else values[..., [k for k in clients if k < values.shape[-1]]]


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def last_accuracy(cell: Cell, clients: Clients, moment: str) -> float | None:
    """Mean over clients after the last round."""
    return _mean(_pick(last_accuracies(cell, moment), clients))


def best_accuracy(cell: Cell, clients: Clients, moment: str) -> float | None:
    """The best mean of any round over the clients measured in it (FedDecomp §4.1)."""
    means = [_mean(row) for row in _pick(accuracies(cell, moment), clients)]
    return max((mean for mean in means if mean is not None), default=None)


def best_of_ten(cell: Cell, clients: Clients, moment: str) -> float | None:
    """The best mean over ten consecutive rounds of the clients measured in them, weighted by their samples (FedFac
    §5.2)."""
    values = _pick(accuracies(cell, moment), clients)
    samples = np.array([[sum(pair) for pair in run_directory.read_config(cell.directory)["samples"]]], dtype=float)
    sizes = np.where(np.isnan(values), 0.0, _pick(samples, clients)[:, : values.shape[1]])
    measured = sizes.sum(1) > 0
    if not measured.any():
        return None
    means = (np.nan_to_num(values) * sizes)[measured].sum(1) / sizes[measured].sum(1)
    window = min(10, len(means))
    return float(np.convolve(means, np.ones(window) / window, "valid").max())


def _summary(key: str, scale: float = 1.0) -> Of:
    def of(cell: Cell, clients: Clients, moment: str) -> float | None:
        value = cell.result["summary"].get(key)
        return None if value is None else value / scale

    return of


def _recorded(name: str) -> Of:
    """A number that was recorded last."""

    def of(cell: Cell, clients: Clients, moment: str) -> float | None:
        rounds = probes.read(cell.directory).get(name, {})
        return float(rounds[max(rounds)]) if rounds else None

    return of


def _seconds_in_all(cell: Cell, clients: Clients, moment: str) -> float | None:
    rounds = probes.read(cell.directory).get("server/seconds", {})
    trained = cell.result["summary"].get("seconds")
    return None if trained is None else trained + float(sum(rounds.values()))


def groups(cell: Cell) -> np.ndarray:
    """The domain of each client: there are five, but where every client has its own superclass."""
    config = cell.result["config"]
    return np.arange(config["clients"]) // max(1, config["clients"] // 5)


def _joined(how: str) -> Of:
    """Accuracy of clients that joined at the end."""
    return lambda cell, clients, moment: cell.result.get("newcomers", {}).get(how)


def _leaked(reduce: Callable) -> Of:
    """PSNR over all rounds, clients and images of what an attacker made (FedDecomp, Table 7)."""

    def of(cell: Cell, clients: Clients, moment: str) -> float | None:
        rounds = probes.read(cell.directory).get("leaks/psnr", {})
        return float(reduce(np.concatenate(list(rounds.values())))) if rounds else None

    return of


def _similar(name: str, same: bool | None) -> Of:
    """Mean cosine at the end with the other clients: of all, of the `same` domain or of other ones."""

    def of(cell: Cell, clients: Clients, moment: str) -> float | None:
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


def _matched_within(cell: Cell, clients: Clients, moment: str) -> float | None:
    """Of the weight that went to other clients, the share that went to the same domain."""
    rounds = probes.read(cell.directory).get("matching/weights", {})
    if not rounds:
        return None
    total, group = np.sum(list(rounds.values()), axis=0), groups(cell)
    others = ~np.eye(len(total), dtype=bool)
    weight = float(total[others].sum())
    return float(total[others & (group[:, None] == group)].sum()) / weight if weight else None


def stability(cell: Cell) -> np.ndarray:
    """The share of channels that did not change sides from each round to the next (FedFac, Figure 7)."""
    rounds = probes.read(cell.directory).get("split/shared", {})
    masks = [rounds[number] for number in sorted(rounds)]
    return np.array([(a == b).mean() for a, b in itertools.pairwise(masks)])


def _stable(cell: Cell, clients: Clients, moment: str) -> float | None:
    shares = stability(cell)
    return float(shares[-1]) if len(shares) else None


def _distance(name: str) -> Of:
    """How far the clients' updates are from those of client 1, at the end."""

    def of(cell: Cell, clients: Clients, moment: str) -> float | None:
        rounds = probes.read(cell.directory).get(f"updates/{name}", {})
        return _mean(_pick(rounds[max(rounds)], clients)) if rounds else None

    return of


def _loss(cell: Cell, clients: Clients, moment: str) -> float | None:
    values = [row["loss"] for row in cell.rows if row["round"] == cell.result["config"]["rounds"]]
    return _mean(np.array([value for value in values if value is not None]))


def _spread(cell: Cell, clients: Clients, moment: str) -> float | None:
    """Standard deviation over clients of the accuracy after the last round."""
    return float(np.nanstd(last_accuracies(cell, moment)))


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


def _entropy(cell: Cell, clients: Clients, moment: str) -> float | None:
    rounds = probes.read(cell.directory).get("neurons/output", {})
    if not rounds:
        return None
    outputs = rounds[max(rounds)]
    return _mean(entropy(outputs / max(float(outputs.std()), 1e-12)))


LAST = "the last round, {}"
END = "at the end of the run, after the last local training"
RUN = "the whole run"
JOINED = "after the last round, by clients that join then"

MEASURES = {
    "accuracy": Measure(last_accuracy, LAST, share=True),
    "best": Measure(best_accuracy, "the best round, {}", share=True),
    "best-of-ten": Measure(best_of_ten, "the best ten rounds in a row, {}", share=True),
    "client-std": Measure(_spread, LAST, share=True),
    "loss": Measure(_loss, "the mean of the last round's local steps"),
    "cost": Measure(_summary("formula", 1e9), RUN, "GB"),
    "parameters": Measure(_summary("parameters", 1e6), END, "M"),
    "seconds": Measure(_summary("seconds"), "local training of the whole run", "s"),
    "seconds-in-all": Measure(
        _seconds_in_all, "local training and the server's part, the whole run", "s", record="server"
    ),
    "u-others": Measure(_similar("u", None), END, record="similarity"),
    "v-within": Measure(_similar("v", True), END, record="similarity"),
    "v-between": Measure(_similar("v", False), END, record="similarity"),
    "key-others": Measure(_similar("key", None), END, record="similarity"),
    "matched-within": Measure(_matched_within, RUN, record="matching"),
    "drift": Measure(_recorded("drift/distance"), END, record="drift"),
    "moved-shared": Measure(_recorded("movement/shared"), END, record="movement"),
    "moved-personal": Measure(_recorded("movement/personal"), END, record="movement"),
    "masked-shared": Measure(_recorded("masked/shared"), END, record="masked", share=True),
    "masked-personal": Measure(_recorded("masked/personal"), END, record="masked", share=True),
    "new-download": Measure(_joined("download"), JOINED, share=True),
    "new-fine-tune": Measure(_joined("fine-tune"), JOINED, share=True),
    "new-local-train": Measure(_joined("local-train"), JOINED, share=True),
    "new-ensemble": Measure(_joined("ensemble"), JOINED, share=True),
    "psnr": Measure(_leaked(np.mean), "five times in the run, after local training", "dB", record="leaks"),
    "psnr-most": Measure(_leaked(np.max), "five times in the run, after local training", "dB", record="leaks"),
    "stable": Measure(_stable, "between the last two rounds", record="split", share=True),
    "distance": Measure(_distance("weight"), END, record="updates"),
    "distance-u": Measure(_distance("u"), END, record="updates"),
    "distance-v": Measure(_distance("v"), END, record="updates"),
    "entropy": Measure(_entropy, END, record="neurons"),
}
