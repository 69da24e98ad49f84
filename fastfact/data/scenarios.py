"""From one data set to the clients of a scenario (Factorized-FL, arXiv version, §5.1 and appendix B).

A scenario is a partition (which samples each client holds) and what each client calls its labels. Protocol of
evaluation: by default personalized accuracy is measured on a fifth of each client's own partition, held out class by
class, under the client's own label permutation: a client is tested on the label distribution it trains on. With a
global test set (Factorized-FL, arXiv version, §B.1; SimFed §5.1) it is measured on samples that were split off the data
set before it was dealt out. No sample is held by a train and a test set.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fastfact.data.client import Client
from fastfact.data.datasets import Dataset, Groups, load

PERMUTATION_SEED = 1234
MIN_SAMPLES = 10


@dataclass(frozen=True)
class Options:
    """What a partition may ask for besides the number of clients; see `make_clients`."""

    alpha: float = 0.5
    classes_per_client: int = 2
    samples: int | None = None


def label_permutation(client: int, num_classes: int) -> list[int]:
    """The permuted label of each original label for `client` (from 0), as appendix B, Table 2 lists them.

    Python's `random`, seeded with the "fixed global seed + client id" 1234 + client, shuffles the list of labels.
    """
    permuted = list(range(num_classes))
    random.Random(PERMUTATION_SEED + client).shuffle(permuted)
    return permuted


def iid(data: Dataset, clients: int, rng: np.random.Generator, options: Options) -> list[np.ndarray]:
    """Every class dealt out evenly; sizes differ by at most one."""
    return _deal(data.y.numpy(), clients, rng)


def _deal(y: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    shuffled = rng.permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    return [by_class[client::clients] for client in range(clients)]


def dirichlet(data: Dataset, clients: int, rng: np.random.Generator, options: Options) -> list[np.ndarray]:
    """Every class cut into shares drawn from Dirichlet(α, …, α) over the clients (Factorized-FL, FedFac).

    No client is left with fewer than 10 samples (or n / clients where that is less): random samples of whoever then
    holds most go to those below, one by one. Drawing again until all are large enough never ends for a small α.
    """
    y = data.y.numpy()
    shares: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        cuts = np.cumsum(rng.dirichlet(np.full(clients, options.alpha)))[:-1]
        for share, part in zip(shares, np.split(members, np.round(cuts * len(members)).astype(int)), strict=True):
            share.extend(part.tolist())
    least = min(MIN_SAMPLES, len(y) // clients)
    for share in shares:
        while len(share) < least:
            giver = max(shares, key=len)
            share.append(giver.pop(int(rng.integers(len(giver)))))
    return [np.array(share) for share in shares]


def client_dirichlet(data: Dataset, clients: int, rng: np.random.Generator, options: Options) -> list[np.ndarray]:
    """Every client draws its own class proportions from Dirichlet(α, …, α), all as many samples (FedDecomp, §4.1).

    Where a class runs out, the client's other classes make up for it in proportion. By default the data set is dealt
    out as far as it goes.
    """
    y, size = data.y.numpy(), options.samples or len(data) // clients
    pools = [rng.permutation(np.flatnonzero(y == label)).tolist() for label in range(len(data.classes))]
    shares = []
    for _ in range(clients):
        proportions = rng.dirichlet(np.full(len(pools), options.alpha))
        share: list[int] = []
        while len(share) < size:
            left = np.array([len(pool) for pool in pools])
            odds = np.where(left > 0, proportions, 0.0)
            # A client whose classes have all run out takes what is left.
            odds = odds / odds.sum() if odds.sum() > 0 else left / left.sum()
            for pool, count in zip(pools, rng.multinomial(size - len(share), odds), strict=True):
                count = min(count, len(pool))
                share += pool[len(pool) - count :]
                del pool[len(pool) - count :]
        shares.append(np.array(share))
    return shares


def pathological(data: Dataset, clients: int, rng: np.random.Generator, options: Options) -> list[np.ndarray]:
    """Every client has S classes, drawn so that each class has as many holders, but for one, and is cut evenly.

    FedAvg (McMahan et al., 2017) deals out shards of sorted samples, of which a client can get several of one class;
    FedFac names S, the number of classes of a client, which is exact here. Classes nobody draws are left out.
    """
    y, classes = data.y.numpy(), len(data.classes)
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in range(clients):
        fewest_first = np.lexsort((rng.random(classes), np.array([len(members) for members in holders])))
        for label in fewest_first[: options.classes_per_client]:
            holders[label].append(client)
    shares: list[list[int]] = [[] for _ in range(clients)]
    for label, members in enumerate(holders):
        if members:
            parts = np.array_split(rng.permutation(np.flatnonzero(y == label)), len(members))
            for client, part in zip(members, parts, strict=True):
                shares[client].extend(part.tolist())
    return [np.array(share, dtype=np.int64) for share in shares]


def natural(data: Dataset, clients: int, rng: np.random.Generator, options: Options) -> list[np.ndarray]:
    """Every client is one writer or speaker with 10 samples or more, `clients` of them drawn, in alphabetical order."""
    assert data.owner is not None
    owner = data.owner.numpy()
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(len(data.owners) + 1))
    enough = np.flatnonzero(np.diff(starts) >= MIN_SAMPLES)
    if clients > len(enough):
        raise ValueError(
            f"clients={clients}, must be at most {len(enough)}: so many of {data.name}'s {len(data.owners)} owners have"
            f" {MIN_SAMPLES} samples or more"
        )
    return [order[starts[n] : starts[n + 1]] for n in np.sort(rng.permutation(enough)[:clients])]


Partition = Callable[[Dataset, int, np.random.Generator, Options], list[np.ndarray]]


@dataclass(frozen=True)
class Scenario:
    """partition: which samples each client holds. permutes: whether each client's labels are permuted in its own way.

    groups: "domains" or "superclasses" of the data set; each group has as many clients as the others, one after
    another, is dealt out evenly to them, and its labels are numbered within it. "halves": the twins, see `_twins`.
    "views": the groups have all labels, and see the images each in its own way, see `VIEWS`.
    owned: the data set must say whose each sample is; the test samples are drawn regardless of class.
    """

    partition: Partition
    summary: str
    permutes: bool = False
    groups: str | None = None
    owned: bool = False

    @property
    def permuted(self) -> bool:
        """Whether one label means different classes with different clients."""
        return self.permutes or self.groups is not None

    def group(self, client: int, clients: int, groups: int) -> int | None:
        """Which of so many groups client (from 0) of so many is in."""
        return None if self.groups in (None, "halves") else client // (clients // groups)


SCENARIOS = {
    "iid": Scenario(iid, "every class dealt out evenly"),
    "non-iid": Scenario(dirichlet, "every class by Dirichlet(α) shares"),
    "permuted-iid": Scenario(iid, "iid, each client with labels permuted in its own way", permutes=True),
    "permuted-non-iid": Scenario(dirichlet, "non-iid, labels permuted likewise", permutes=True),
    "client-dirichlet": Scenario(client_dirichlet, "every client with class shares by Dirichlet(α), all the same size"),
    "pathological": Scenario(pathological, "every client with S classes"),
    "domains": Scenario(iid, "groups of clients with classes of their own, labels permuted", True, "domains"),
    "superclasses": Scenario(iid, "groups of clients with one superclass each", groups="superclasses"),
    "twins": Scenario(
        iid, "1 and 2: partitions of half of the labels; 3: 2 with labels permuted; 4: the other half", groups="halves"
    ),
    "conflicting": Scenario(iid, "groups of clients that see the images in ways of their own", True, "views"),
    "natural": Scenario(natural, "every client one writer or speaker", owned=True),
}


def _shuffled(seed: int) -> Callable[[Dataset, torch.Tensor], torch.Tensor]:
    def view(data: Dataset, x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x[0, 0].numel(), generator=torch.Generator().manual_seed(seed))
        return x.flatten(2)[:, :, order].view_as(x)

    return view


def _negative(data: Dataset, x: torch.Tensor) -> torch.Tensor:
    return 255 - x if x.dtype == torch.uint8 else data.x.min() + data.x.max() - x


VIEWS: dict[str, Callable[[Dataset, torch.Tensor], torch.Tensor]] = {
    "as they are": lambda data, x: x,
    "negative": _negative,
    "rotated by 90°": lambda data, x: x.rot90(1, (2, 3)),
    "pixels shuffled": _shuffled(1),
    "pixels shuffled otherwise": _shuffled(2),
}
"""The domains of the scenario "conflicting": name → view(data, x [n, c, h, w] of it), as the clients of a group see x.
One network that is to serve two of them serves neither well."""


def groups_of(data: Dataset, scenario: str) -> Groups | None:
    """The groups of labels the clients of a scenario are spread over, in order; None where there are none.

    With K clients and G groups client k (from 0) belongs to group k // (K / G). Raises ValueError for a data set
    without such groups.
    """
    kind = SCENARIOS[scenario].groups
    if kind is None:
        return None
    if kind == "halves":
        half = len(data.classes) // 2
        return {"first half": tuple(range(half)), "second half": tuple(range(half, 2 * half))}
    if kind == "views":
        if data.vocabulary is not None or data.x.dim() != 4 or data.x.shape[2] != data.x.shape[3]:
            raise ValueError(f"scenario={scenario!r}: {data.name} has no square images")
        return {name: tuple(range(len(data.classes))) for name in VIEWS}
    groups: Groups = getattr(data, kind)
    if not groups:
        raise ValueError(f"scenario={scenario!r}: the data set {data.name} has no {kind}")
    return groups


def hold_out(y: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Indices into `y` for training and for testing, `fraction` of each class (rounded) to the test set.

    A class with two samples or more has at least one on each side; a single sample trains. Where that leaves no test
    sample at all, one training sample is moved.
    """
    train: list[int] = []
    test: list[int] = []
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        test.extend(members[:count])
        train.extend(members[count:])
    if not test:
        test.append(train.pop(int(rng.integers(len(train)))))
    return np.sort(train), np.sort(test)


def _shares(
    data: Dataset, scenario: str, clients: int, rng: np.random.Generator, options: Options
) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
    """The samples of each client, and the labels of the data set it knows, in its own order before permutation."""
    chosen, samples = SCENARIOS[scenario], options.samples
    if chosen.owned and data.owner is None:
        raise ValueError(f"scenario={scenario!r}: the data set {data.name} does not say whose each sample is")
    if chosen.partition is client_dirichlet and clients * (samples or 1) > len(data):
        raise ValueError(
            f"samples={samples}: {clients} clients of so many are more than the {len(data)} of {data.name}"
        )
    if chosen.partition is pathological and not 1 <= options.classes_per_client <= len(data.classes):
        raise ValueError(f"classes_per_client={options.classes_per_client}, must be 1 … {len(data.classes)}")
    groups = groups_of(data, scenario)
    if groups is None:
        return chosen.partition(data, clients, rng, options), [tuple(range(len(data.classes)))] * clients
    if chosen.groups == "halves":
        return _twins(data, clients, rng, groups)
    each, rest = divmod(clients, len(groups))
    if rest or not each:
        raise ValueError(f"clients={clients}, must be a multiple of {len(groups)}, the {chosen.groups} of {data.name}")
    if chosen.groups == "views":
        return chosen.partition(data, clients, rng, options), [tuple(range(len(data.classes)))] * clients
    y, shares = data.y.numpy(), []
    for labels in groups.values():
        members = np.flatnonzero(np.isin(y, labels))
        shares += [members[part] for part in _deal(y[members], each, rng)]
    return shares, [labels for labels in groups.values() for _ in range(each)]


def _twins(
    data: Dataset, clients: int, rng: np.random.Generator, groups: Groups
) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
    """The four clients behind Factorized-FL's Figures 1 and 4 (2 and 4 of the arXiv version): partitions 1 and 2 of one
    domain, partition 2 again (its labels will be permuted), and as many samples of another domain.

    The domains are the first and the second half of the labels: those of MNIST and CIFAR-10 in mnist-cifar10.
    """
    if clients != 4:
        raise ValueError(f"clients={clients}, must be 4 in the scenario 'twins'")
    y = data.y.numpy()
    first, second = (np.flatnonzero(np.isin(y, labels)) for labels in groups.values())
    one, two = (first[part] for part in _deal(y[first], 2, rng))
    other = second[_deal(y[second], 2, rng)[0]]
    near, far = groups.values()
    return [one, two, two, other], [near, near, near, far]


TWIN = 2
"""The twin of client 1, whose samples it holds, for training and testing, and whose labels are permuted: by client 0's
permutation, for client 2's leaves five labels as they are."""


def make_clients(
    dataset: str | Dataset,
    scenario: str,
    clients: int,
    seed: int,
    *,
    alpha: float = 0.5,
    test_fraction: float = 0.2,
    classes_per_client: int = 2,
    samples: int | None = None,
    test_set: str = "own",
    root: str | Path | None = None,
) -> list[Client]:
    """The clients of `scenario` on `dataset`, the same for the same arguments everywhere.

    `seed` draws the partition and the held-out samples; the label permutations are the paper's and do not depend on it.
    Samples of a client keep the order of the data set.
    alpha: concentration of the Dirichlet scenarios. classes_per_client: S of the pathological one. samples: the most
    samples of a client, train and test together, drawn at random. root: see `load`.
    test_set: "own", `test_fraction` of what a client holds is its test set; "global", that fraction of each class of
    the data set is split off first, the rest is dealt out to train on (`samples` counts these alone), and a client is
    tested on all split-off samples of the classes that the scenario gives it, labelled as its own are.

    In the scenarios "domains" and "superclasses" labels are places in the group's list of classes, for "domains"
    permuted by `label_permutation` as Table 4 of Factorized-FL lists them. In "conflicting" the images, dealt out
    evenly, look different to each of five groups of clients, see `VIEWS`. "natural" draws a client's test samples
    regardless of class, as FedFac does; as neighbouring texts of Shakespeare overlap, it tests on much it has seen.

    Raises ValueError for an unknown data set or scenario or one without what the scenario needs, fewer than one client,
    fewer than two samples per client, a negative seed, α ≤ 0 or a test fraction outside (0, 1), and what `load` raises.
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario={scenario!r}, must be one of {', '.join(SCENARIOS)}")
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha={alpha}, must be positive")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction}, must lie between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed={seed}, must not be negative")
    if clients < 1:
        raise ValueError(f"clients={clients}, must be at least 1")
    if test_set not in ("own", "global"):
        raise ValueError(f"test_set={test_set!r}, must be own or global")
    if test_set == "global" and SCENARIOS[scenario].owned:
        raise ValueError(f"test_set='global': the clients of scenario {scenario!r} are tested on samples of their own")
    if samples is not None and samples < 2:
        raise ValueError(f"samples={samples}, must be at least 2: one to train and one to test")
    data = load(dataset, root) if isinstance(dataset, str) else dataset
    if 2 * clients > len(data):
        raise ValueError(
            f"clients={clients}, must be at most {len(data) // 2}: {data.name} has {len(data)} samples,"
            " and a client needs one to train and one to test"
        )
    common: Dataset | None = None
    if test_set == "global":
        rest, split_off = hold_out(data.y.numpy(), test_fraction, np.random.default_rng([seed, 4]))
        data, common = _part(data, rest), _part(data, split_off)
    chosen, y = SCENARIOS[scenario], data.y.numpy()
    options = Options(alpha, classes_per_client, samples)
    shares, names = _shares(data, scenario, clients, np.random.default_rng([seed, 0]), options)
    outputs = max(map(len, names))
    groups = len(groups_of(data, scenario) or ())
    tests: dict[tuple[int | None, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}
    made = []
    for client, (share, labels) in enumerate(zip(shares, names, strict=True)):
        share, twin = np.sort(share), chosen.groups == "halves" and client == TWIN
        drawn = client - 1 if twin else client
        if samples is not None and len(share) > samples:
            share = np.sort(np.random.default_rng([seed, 2, drawn]).choice(share, samples, replace=False))
        if len(share) < 2:
            empty = [name for label, name in enumerate(data.classes) if not (y == label).any()]
            what = "use fewer clients"
            if empty and chosen.partition is pathological:
                what = f"{data.name} has no sample of class {empty[0]}, raise classes_per_client"
            raise ValueError(f"clients={clients}: client {client} has {len(share)} samples, needs two; {what}")
        group = chosen.group(client, clients, groups)
        view = list(VIEWS.values())[group] if chosen.groups == "views" and group is not None else None
        new = torch.zeros(len(data.classes), dtype=torch.int64)
        new[list(labels)] = torch.tensor(
            label_permutation(client, len(labels))
            if chosen.permutes
            else label_permutation(0, len(labels))
            if twin
            else range(len(labels))
        )
        if common is None:
            stratum = np.zeros(len(share)) if chosen.owned else y[share]
            parts = hold_out(stratum, test_fraction, np.random.default_rng([seed, 1, drawn]))
            train, test = (torch.from_numpy(share[part]) for part in parts)
            x, of = _inputs(data, test, view), data.y[test]
        else:
            train = torch.from_numpy(share)
            if (group, labels) not in tests:
                known = torch.isin(common.y, torch.tensor(labels)).nonzero().flatten()
                tests[group, labels] = _inputs(common, known, view), common.y[known]
            x, of = tests[group, labels]
        made.append(
            Client(
                (_inputs(data, train, view), new[data.y[train]]),
                (x, new[of]),
                num_classes=outputs,
                vocabulary=data.vocabulary,
                group=group,
            )
        )
    return made


def _inputs(data: Dataset, index: torch.Tensor, view) -> torch.Tensor:
    """The samples of these indices as a model takes them, in a view of the images (see `VIEWS`)."""
    if view is None:
        return data.inputs(index)
    return replace(data, x=view(data, data.x[index]).contiguous()).inputs(torch.arange(len(index)))


def _part(data: Dataset, index: np.ndarray) -> Dataset:
    """The data set of these samples only."""
    owner = None if data.owner is None else data.owner[index]
    return replace(data, x=data.x[index], y=data.y[index], owner=owner)
