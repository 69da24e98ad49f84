"""What is said of a federation between two rounds."""

import math

import torch

from fastfact.federation import analysis


def test_separation_counts_pairs():
    """Against all pairs counted one by one, ties half."""
    torch.manual_seed(0)
    groups = [0, 0, 0, 1, 1, 2]
    similarity = torch.randint(0, 6, (6, 6)).double()
    similarity = similarity + similarity.T
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    within = [similarity[i, j].item() for i, j in pairs if groups[i] == groups[j]]
    between = [similarity[i, j].item() for i, j in pairs if groups[i] != groups[j]]
    auc = sum((w > b) + (w == b) / 2 for w in within for b in between) / len(within) / len(between)
    assert len(set(within) & set(between)) > 0
    assert math.isclose(analysis.separation(similarity, groups)["auc"], auc)


def test_separation_of_groups_that_are_known():
    groups = [0, 0, 1, 1, 2]
    blocks = torch.eye(5) + torch.tensor([[float(a == b) for b in groups] for a in groups])
    assert analysis.separation(blocks, groups) == {"auc": 1.0, "nearest": 1.0}
    assert analysis.separation(-blocks, groups) == {"auc": 0.0, "nearest": 0.0}
    alone = analysis.separation(torch.eye(3), [0, 1, 2])
    assert math.isnan(alone["auc"]) and math.isnan(alone["nearest"])
    one = analysis.separation(torch.eye(3), [0, 0, 0])
    assert math.isnan(one["auc"]) and one["nearest"] == 1
