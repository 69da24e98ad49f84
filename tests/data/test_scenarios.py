"""Partitions and labels, on the digits and on made-up samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastfact as ff
from fastfact import data
from fastfact.data.datasets import _cifar100_groups

# Factorized-FL, arXiv version, appendix B, Table 2: a row per original label, a column per client 1 … 20.
TABLE_2 = """
0 2 5 3 0 8 2 4 4 2 2 0 6 1 8 4 0 0 6 9 7
1 8 4 1 5 1 8 1 0 9 7 7 3 6 2 0 4 1 8 1 4
2 3 0 5 3 4 9 9 5 4 1 5 5 3 0 1 6 3 7 6 5
3 5 9 0 7 9 3 8 8 7 6 2 7 8 7 6 7 4 4 3 8
4 6 2 6 9 6 5 2 1 0 9 6 1 7 3 7 5 5 3 8 9
5 4 1 4 8 5 6 6 6 3 4 9 4 4 4 5 9 8 1 2 0
6 9 3 2 1 2 0 3 2 6 3 3 0 5 6 2 1 7 2 5 1
7 0 7 9 4 3 7 0 3 5 0 1 2 9 5 3 2 9 5 0 6
8 1 8 7 6 7 4 5 7 8 5 8 9 0 9 8 3 6 0 7 2
9 7 6 8 2 0 1 7 9 1 8 4 8 2 1 9 8 2 9 4 3
"""


# Table 4: label in CIFAR-100, then the permuted label with each of the domain's four clients, domain after domain.
TABLE_4 = """
5 2 5 3 0
20 8 4 1 5
22 3 0 5 3
25 5 9 0 7
39 6 2 6 9
40 4 1 4 8
84 9 3 2 1
86 0 7 9 4
87 1 8 7 6
94 7 6 8 2

0 8 2 4 4
9 1 8 1 0
10 4 9 9 5
16 9 3 8 8
28 6 5 2 1
51 5 6 6 6
53 2 0 3 2
57 3 7 0 3
61 7 4 5 7
83 0 1 7 9

47 2 2 0 6
52 9 7 7 3
54 4 1 5 5
56 7 6 2 7
59 0 9 6 1
62 3 4 9 4
70 6 3 3 0
82 5 0 1 2
92 8 5 8 9
96 1 8 4 8

8 1 8 4 0
13 6 2 0 4
41 3 0 1 6
48 8 7 6 7
58 7 3 7 5
69 4 4 5 9
81 5 6 2 1
85 9 5 3 2
89 0 9 8 3
90 2 1 9 8

3 0 6 9 7
34 1 8 1 4
42 3 7 6 5
43 4 4 3 8
63 5 3 8 9
64 8 1 2 0
66 7 2 5 1
75 9 5 0 6
88 6 0 7 2
97 2 9 4 3
"""
DOMAINS = ("Household Objects", "Fruits & Foods", "Trees & Flowers", "Transport", "Animals")
# The superclass of each label of CIFAR-100: the coarse labels in its files.
COARSE = """
4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 6 13 15 3 15 0 11 1 10 12 14 16 9 11 5 5 19 8 8 15 13 14 17
18 10 16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 0 1 16 12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6
0 17 8 14 13
"""


def cifar100(per_class=60):
    """CIFAR-100 in all but the pictures: sample i is the number i."""
    domains, superclasses = _cifar100_groups()
    y = torch.arange(100).repeat(per_class)
    x = torch.arange(len(y)).float().view(-1, 1, 1, 1)
    return data.Dataset("cifar100", x, y, tuple(map(str, range(100))), domains=domains, superclasses=superclasses)


def counts(client, classes=10):
    return torch.bincount(torch.cat([client.train[1], client.test[1]]), minlength=classes)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def key(x):
    return {row.numpy().tobytes() for row in x}


def original(client, y):
    """Labels before the permutation."""
    permuted = data.label_permutation(client, 10)
    return torch.tensor([permuted.index(int(label)) for label in y])


def test_label_permutations_are_the_table_of_the_paper():
    rows = [list(map(int, line.split())) for line in TABLE_2.split("\n") if line]
    for label, *permuted in rows:
        assert [data.label_permutation(client, 10)[label] for client in range(20)] == permuted


def test_label_permutation_leaves_the_global_generator_alone():
    import random

    random.seed(7)
    first = random.random()
    random.seed(7)
    data.label_permutation(3, 10)
    assert random.random() == first


def test_digits_are_the_real_ones_normalised(digits):
    assert digits.x.shape == (1797, 1, 8, 8) and digits.x.dtype == torch.float32 and digits.y.dtype == torch.int64
    assert abs(digits.x.mean()) < 1e-3 and abs(digits.x.std() - 1) < 1e-3
    assert torch.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.classes == tuple("0123456789")


def test_clients_go_into_a_federation_as_they_are():
    made = data.make_clients("digits", "domains", 5, seed=0)
    assert all(isinstance(client, ff.Client) and client.num_classes == 2 for client in made)
    model = lambda: ff.models.build("mlp", (1, 8, 8), made[0].num_classes, width=0.1)  # noqa: E731
    assert len(ff.Federation(model, made, "stand-alone", cohort=1)) == 5


ON_DIGITS = [name for name in data.SCENARIOS if name not in ("superclasses", "natural", "twins")]


@pytest.mark.parametrize("scenario", ON_DIGITS)
def test_every_sample_has_one_owner(digits, scenario):
    made = data.make_clients("digits", scenario, 20, seed=0)
    parts = [x for client in made for x, _ in (client.train, client.test)]
    # Clients of one size share 1,797 samples only so far.
    assert sum(len(x) for x in parts) == (1780 if scenario == "client-dirichlet" else len(digits))
    assert len(key(torch.cat(parts))) == sum(len(x) for x in parts)
    assert all(len(x) == len(y) for client in made for x, y in (client.train, client.test))


def test_permuted_scenarios_hold_the_same_samples_under_other_labels():
    plain = data.make_clients("digits", "non-iid", 20, seed=3)
    permuted = data.make_clients("digits", "permuted-non-iid", 20, seed=3)
    for client, (a, b) in enumerate(zip(plain, permuted, strict=True)):
        for (x, y), (other_x, other_y) in zip((a.train, a.test), (b.train, b.test), strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(original(client, other_y), y)
    assert not torch.equal(plain[0].train[1], permuted[0].train[1])


def test_iid_deals_every_class_evenly():
    made = data.make_clients("digits", "iid", 20, seed=1)
    counts = torch.stack([torch.bincount(torch.cat([c.train[1], c.test[1]]), minlength=10) for c in made])
    assert int((counts.amax(0) - counts.amin(0)).max()) <= 1
    assert int(counts.sum(1).max() - counts.sum(1).min()) <= 1


def test_dirichlet_shares_follow_alpha():
    def concentration(alpha):
        made = data.make_clients("digits", "non-iid", 20, seed=2, alpha=alpha)
        counts = torch.stack([torch.bincount(torch.cat([c.train[1], c.test[1]]), minlength=10) for c in made]).double()
        shares = counts / counts.sum(0)
        return float((shares**2).sum(0).mean())

    # E[Σ p²] = (α + 1) / (Kα + 1) for a symmetric Dirichlet over K clients.
    for alpha in (0.5, 5.0, 500.0):
        expected = (alpha + 1) / (20 * alpha + 1)
        assert concentration(alpha) == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize(("clients", "alpha", "least"), [(20, 0.5, 10), (20, 1e-3, 10), (300, 0.1, 5), (898, 0.5, 2)])
def test_no_client_is_left_without_samples(clients, alpha, least):
    made = data.make_clients("digits", "non-iid", clients, seed=0, alpha=alpha)
    assert min(len(c.train[1]) + len(c.test[1]) for c in made) >= least
    assert min(min(len(c.train[1]), len(c.test[1])) for c in made) >= 1
    assert sum(len(c.train[1]) + len(c.test[1]) for c in made) == 1797


def test_same_arguments_same_clients_and_another_seed_others():
    a, b, c = (data.make_clients("digits", "permuted-non-iid", 20, seed=s) for s in (5, 5, 6))
    assert all(torch.equal(p.train[0], q.train[0]) for p, q in zip(a, b, strict=True))
    assert not all(p.train[0].shape == r.train[0].shape for p, r in zip(a, c, strict=True))


def test_domain_labels_are_table_4_of_the_paper():
    made = data.make_clients(cifar100(), "domains", 20, seed=0)
    blocks = [[list(map(int, row.split())) for row in block.split("\n")] for block in TABLE_4.strip().split("\n\n")]
    assert list(cifar100().domains) == list(DOMAINS)
    for domain, rows in enumerate(blocks):
        assert cifar100().domains[DOMAINS[domain]] == tuple(row[0] for row in rows)
        for place in range(4):
            client, table = made[4 * domain + place], {row[0]: row[1 + place] for row in rows}
            x, y = (torch.cat([client.train[i], client.test[i]]) for i in (0, 1))
            assert {int(sample) % 100: int(label) for sample, label in zip(x.flatten(), y, strict=True)} == table
            assert client.num_classes == 10
            assert torch.equal(counts(client), torch.full((10,), 15))


def test_full_cifar100_gives_the_sizes_of_the_paper():
    made = data.make_clients(cifar100(600), "domains", 20, seed=0)
    assert [len(c.train[1]) for c in made] == [1200] * 20 and [len(c.test[1]) for c in made] == [300] * 20
    made = data.make_clients(cifar100(600), "superclasses", 20, seed=0)
    assert [len(c.train[1]) for c in made] == [2400] * 20 and [c.num_classes for c in made] == [5] * 20


def test_superclasses_are_the_coarse_labels():
    coarse, made = list(map(int, COARSE.split())), data.make_clients(cifar100(10), "superclasses", 20, seed=0)
    assert len(coarse) == 100
    for client, part in enumerate(made):
        labels = [label for label in range(100) if coarse[label] == client]
        for sample, label in zip(part.train[0].flatten().long() % 100, part.train[1], strict=True):
            assert labels[int(label)] == int(sample)


def test_domains_of_digits_are_pairs(digits):
    made = data.make_clients("digits", "domains", 20, seed=0)
    assert [c.num_classes for c in made] == [2] * 20
    where = {row.numpy().tobytes(): int(label) for row, label in zip(digits.x, digits.y, strict=True)}
    for client, part in enumerate(made):
        first = 2 * (client // 4)
        permuted = data.label_permutation(client, 2)
        for x, y in (part.train, part.test):
            assert [permuted[where[row.numpy().tobytes()] - first] for row in x] == y.tolist()
    assert len({tuple(data.label_permutation(client, 2)) for client in range(20)}) == 2


@pytest.mark.parametrize(("clients", "classes"), [(20, 2), (20, 3), (7, 4), (40, 1)])
def test_pathological_clients_have_as_many_classes_as_asked(clients, classes):
    made = data.make_clients("digits", "pathological", clients, seed=4, classes_per_client=classes)
    held = torch.stack([counts(c) > 0 for c in made])
    assert held.sum(1).tolist() == [classes] * clients
    holders = held.sum(0)
    assert int(holders.max() - holders.min()) <= 1
    for label in range(10):
        sizes = [int(counts(c)[label]) for c in made if counts(c)[label]]
        assert max(sizes) - min(sizes) <= 1
    if classes == 2:
        assert len({tuple(row.tolist()) for row in held}) > 5


def test_client_dirichlet_sizes_and_concentration():
    made = data.make_clients(cifar100(600), "client-dirichlet", 40, seed=1, alpha=0.1, samples=600, test_fraction=1 / 6)
    sizes = {len(c.train[1]) + len(c.test[1]) for c in made}
    assert sizes == {600} and all(abs(len(c.test[1]) - 100) <= 15 for c in made)
    for alpha in (0.1, 1.0):
        made = data.make_clients(cifar100(600), "client-dirichlet", 40, seed=1, alpha=alpha, samples=600)
        shares = torch.stack([counts(c, 100) for c in made]).double() / 600
        # E[Σ p²] = (α + 1) / (Cα + 1), and 1/n more from drawing n samples.
        assert float((shares**2).sum(1).mean()) == pytest.approx((alpha + 1) / (100 * alpha + 1), rel=0.25)


def test_client_dirichlet_can_use_up_everything():
    made = data.make_clients("digits", "client-dirichlet", 30, seed=0, alpha=0.01)
    assert {len(c.train[1]) + len(c.test[1]) for c in made} == {59}


def test_samples_cuts_every_client():
    full = data.make_clients("digits", "permuted-non-iid", 20, seed=0)
    cut = data.make_clients("digits", "permuted-non-iid", 20, seed=0, samples=40)
    for a, b in zip(full, cut, strict=True):
        sizes = [len(c.train[1]) + len(c.test[1]) for c in (a, b)]
        assert sizes[1] == min(sizes[0], 40)
        assert key(torch.cat([b.train[0], b.test[0]])) <= key(torch.cat([a.train[0], a.test[0]]))


def test_natural_clients_are_the_owners():
    sizes = [30, 5, 12, 50, 10, 9]
    owner = torch.repeat_interleave(torch.arange(6), torch.tensor(sizes))[torch.randperm(sum(sizes))]
    x = torch.stack([owner.float(), torch.arange(len(owner)).float()], 1)
    made_up = data.Dataset("made up", x, owner % 2, ("even", "odd"), owner=owner, owners=tuple("abcdef"))
    made = data.make_clients(made_up, "natural", 4, seed=0)
    parts = [torch.cat([c.train[0], c.test[0]]) for c in made]
    assert [part[:, 0].unique().tolist() for part in parts] == [[0], [2], [3], [4]]
    assert [len(part) for part in parts] == [30, 12, 50, 10] and len(torch.cat(parts)[:, 1].unique()) == 102
    assert [len(c.test[1]) for c in made] == [6, 2, 10, 2]
    few = {tuple(c.train[0][0, 0].item() for c in data.make_clients(made_up, "natural", 2, seed=s)) for s in range(20)}
    assert len(few) > 2 and all(first < second for first, second in few)
    with pytest.raises(ValueError, match="clients=5, must be at most 4: so many of made up's 6 owners have 10 samples"):
        data.make_clients(made_up, "natural", 5, seed=0)


def test_permuted_says_where_labels_differ():
    differ = {name for name, scenario in data.SCENARIOS.items() if scenario.permuted}
    assert differ == {"permuted-iid", "permuted-non-iid", "domains", "superclasses", "twins", "conflicting"}


def test_twins_are_two_halves_of_a_domain_one_of_them_twice_and_another_domain(digits):
    made = data.make_clients("digits", "twins", 4, seed=0)
    first, second, twin, far = (torch.cat([client.train[0], client.test[0]]) for client in made)
    assert len(key(torch.cat([first, second, far]))) == len(first) + len(second) + len(far)
    assert key(second) == key(twin) and len(first) + len(second) == int((digits.y < 5).sum())

    def labels(client):
        pairs = zip(*(torch.cat(parts) for parts in zip(client.train, client.test, strict=True)), strict=True)
        return {x.numpy().tobytes(): int(y) for x, y in pairs}

    plain, permuted = labels(made[1]), labels(made[2])
    pairs = {(label, permuted[sample]) for sample, label in plain.items()}
    assert len(pairs) == 5 and any(a != b for a, b in pairs)
    with pytest.raises(ValueError, match="clients=5, must be 4"):
        data.make_clients("digits", "twins", 5, seed=0)


@pytest.mark.parametrize("options", [{}, {"samples": 60}])
def test_twins_hold_out_the_same_samples(options):
    """One may learn from the other: what a twin is tested on, none trains on."""
    made = data.make_clients("digits", "twins", 4, seed=0, **options)
    assert torch.equal(made[1].test[0], made[2].test[0]) and torch.equal(made[1].train[0], made[2].train[0])
    trained = key(torch.cat([client.train[0] for client in made]))
    assert not trained & key(torch.cat([client.test[0] for client in made]))


def test_a_class_without_samples_is_named_where_clients_have_nothing_else(digits):
    some = replace(digits, x=digits.x[digits.y != 4], y=digits.y[digits.y != 4])
    with pytest.raises(
        ValueError, match=r"has 0 samples, needs two; digits has no sample of class 4, raise classes_per"
    ):
        data.make_clients(some, "pathological", 10, seed=0, classes_per_client=1)


def test_a_global_test_set_is_everybodys_under_their_own_labels(digits):
    made = data.make_clients("digits", "permuted-non-iid", 6, seed=0, test_set="global")
    trained = key(torch.cat([client.train[0] for client in made]))
    tested = [key(client.test[0]) for client in made]
    assert all(each == tested[0] for each in tested) and not trained & tested[0]
    assert len(trained | tested[0]) == len(digits)
    assert abs(len(tested[0]) - 0.2 * len(digits)) <= 5  # a fifth of each of ten classes
    first, second = (client.test[1] for client in made[:2])
    other = torch.tensor(data.label_permutation(1, 10))[torch.tensor(data.label_permutation(0, 10)).argsort()]
    assert torch.equal(other[first], second) and not torch.equal(first, second)


def test_domains_share_the_test_set_of_their_classes(digits):
    made = data.make_clients("digits", "domains", 10, seed=0, test_set="global")
    tested = [key(client.test[0]) for client in made]
    assert all(tested[2 * domain] == tested[2 * domain + 1] for domain in range(5))
    assert not tested[0] & tested[2] and sum(map(len, tested)) == 2 * len(set().union(*tested))
    with pytest.raises(ValueError, match="test_set='global': the clients of scenario 'natural'"):
        data.make_clients("digits", "natural", 2, seed=0, test_set="global")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=120), st.floats(0.05, 0.95), st.integers(0, 2**31))
def test_hold_out_is_stratified(labels, fraction, seed):
    from fastfact.data.scenarios import hold_out

    y = np.array(labels)
    train, test = hold_out(y, fraction, np.random.default_rng(seed))
    assert sorted([*train, *test]) == list(range(len(y))) and len(train) and len(test)
    lonely = all(np.sum(y == label) == 1 for label in np.unique(y))
    for label in np.unique(y):
        total, held = np.sum(y == label), np.sum(y[test] == label)
        if total >= 2:
            assert 1 <= held <= total - 1
            assert abs(held - fraction * total) <= 1
        elif not lonely:
            assert held == 0


def test_held_out_fraction_is_a_fifth():
    made = data.make_clients("digits", "permuted-non-iid", 20, seed=0)
    assert sum(len(c.test[1]) for c in made) / 1797 == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "mnits"}, r"dataset='mnits', must be one of digits"),
        ({"scenario": "noniid"}, r"scenario='noniid', must be one of iid, non-iid, permuted-iid, permuted-non-iid"),
        ({"clients": 0}, r"clients=0, must be at least 1"),
        ({"clients": 899}, r"clients=899, must be at most 898"),
        ({"alpha": 0.0}, r"alpha=0.0"),
        ({"alpha": float("nan")}, r"alpha=nan"),
        ({"test_fraction": 1.0}, r"test_fraction=1.0"),
        ({"seed": -1}, r"seed=-1"),
        ({"samples": 1}, r"samples=1, must be at least 2"),
        ({"test_set": "mine"}, r"test_set='mine', must be own or global"),
        ({"scenario": "pathological", "classes_per_client": 11}, r"classes_per_client=11, must be 1 … 10"),
        ({"scenario": "client-dirichlet", "samples": 450}, r"samples=450: 4 clients of so many are more than the 1797"),
        ({"scenario": "domains"}, r"clients=4, must be a multiple of 5, the domains of digits"),
        ({"scenario": "superclasses"}, r"the data set digits has no superclasses"),
        ({"scenario": "natural"}, r"the data set digits does not say whose each sample is"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        data.make_clients(**{"dataset": "digits", "scenario": "non-iid", "clients": 4, "seed": 0, **change})


@pytest.mark.parametrize("test_set", ["own", "global"])
def test_in_conflicting_every_group_sees_the_images_in_its_own_way(test_set):
    """Negative, rotated and shuffled pixels, put right again, are the samples of permuted-iid."""
    views = data.make_clients("digits", "conflicting", 10, 3, test_set=test_set)
    plain = data.make_clients("digits", "permuted-iid", 10, 3, test_set=test_set)
    assert [client.group for client in views] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(client.group is None for client in plain)
    pixels = data.load("digits").x
    for seen, client in zip(views, plain, strict=True):
        for (x, y), (whole, label) in ((seen.train, client.train), (seen.test, client.test)):
            assert torch.equal(y, label)
            if seen.group == 0:
                assert torch.equal(x, whole)
            elif seen.group == 1:
                torch.testing.assert_close(x, pixels.min() + pixels.max() - whole)
            elif seen.group == 2:
                assert torch.equal(x.rot90(-1, (2, 3)), whole)
            else:
                assert torch.equal(x.flatten(1).sort(1).values, whole.flatten(1).sort(1).values)
                assert not torch.equal(x, whole)
    # each way of shuffling is one, and not the other
    moved = [tuple((views[k].train[0] - plain[k].train[0]).abs().sum((0, 1)).flatten().tolist()) for k in (6, 8)]
    assert moved[0] != moved[1]


def test_conflicting_needs_square_images_and_as_many_clients_a_group():
    with pytest.raises(ValueError, match="clients=12, must be a multiple of 5"):
        data.make_clients("digits", "conflicting", 12, 0)
    wide = data.Dataset("wide", torch.randn(40, 1, 4, 6), torch.arange(40) % 4, tuple("abcd"))
    with pytest.raises(ValueError, match="wide has no square images"):
        data.make_clients(wide, "conflicting", 5, 0)
