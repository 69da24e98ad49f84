"""A layer in processes that were forked after its threads had run, as the workers of a DataLoader are."""

import multiprocessing
import os
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fastfact as ff
from fastfact.nn import choice

WAIT = 120


def layer() -> nn.Module:
    torch.manual_seed(0)
    net = ff.factorize(nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 64, 8)), ff.Rank1())
    for one in ff.factorized_layers(net).values():
        one.mu.data.normal_().mul_(torch.rand(one.mu.shape) < 0.1)
        one.compact()
    return net


def step(net: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    loss = net(x).square().sum()
    loss.backward()
    with torch.no_grad():
        return net.eval()(x).sum()


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_fork(body) -> int:
    """Exit code of `body` in a fork of this process; None where it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_a_fork_trains_and_evaluates(several_threads):
    """On one thread, as PyTorch asks of forks: the threads of the parent are not there."""
    expected = step(layer())

    def body():
        torch.set_num_threads(1)
        torch.testing.assert_close(step(layer()), expected)

    assert in_fork(body) == 0


class Made(Dataset):
    """Samples that a factorized layer makes in the worker."""

    def __init__(self, net):
        self.net = net

    def __len__(self):
        return 6

    def __getitem__(self, place):
        with torch.no_grad():
            return self.net(torch.full((1, 8, 8, 8), float(place)))[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_in_the_workers_of_a_loader(several_threads, start):
    net = layer().eval()
    expected = torch.stack([Made(net)[place] for place in range(6)])
    loader = DataLoader(
        Made(net), batch_size=2, num_workers=2, timeout=WAIT, multiprocessing_context=multiprocessing.get_context(start)
    )
    torch.testing.assert_close(torch.cat(list(loader)), expected)


def test_a_fork_chooses_while_another_thread_of_its_parent_did(monkeypatch, tmp_path):
    """Measuring goes on under a lock, whose holder is not there in the fork."""
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path))
    measuring, forked = threading.Event(), threading.Event()

    def hold():
        with choice._lock:
            measuring.set()
            forked.wait(WAIT)

    other = threading.Thread(target=hold)
    other.start()
    measuring.wait(WAIT)

    def body():
        torch.set_num_threads(1)
        choice.forget()
        step(layer())

    code = in_fork(body)
    forked.set()
    other.join()
    assert code == 0
