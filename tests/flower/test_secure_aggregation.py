"""What a method uploads that needs the sum alone, through Flower's SecAgg+ (Bell et al., CCS 2020)."""

import copy
from itertools import count

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from small import cnn, make_clients

import fastfact as ff
from fastfact.methods import make

SAMPLES, CLIP, LEVELS = (10, 7, 12, 9), 8.0, 2**22


class Proxy(ClientProxy):
    def __init__(self, node: int):
        super().__init__(str(node))
        self.node_id = node

    fit = evaluate = get_parameters = get_properties = reconnect = None


class Here(Grid):
    """Asks the app of each node in this process, and keeps what the server got of it. gone: its upload is lost."""

    def __init__(self, apps: dict[int, ClientApp], gone: int | None):
        self.apps, self.gone, self.seen, self.ids = apps, gone, [], count(1)
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in apps}

    set_run = create_message = push_messages = pull_messages = None
    run = property(lambda self: None)

    def get_node_ids(self):
        return list(self.apps)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(next(self.ids))
            # The server reuses the records that it sends.
            reply = self.apps[node](copy.deepcopy(message), self.contexts[node])
            records = reply.content.config_records.values()
            if masked := [record["masked_params"] for record in records if "masked_params" in record]:
                if node == self.gone:
                    reply = Message(Error(1, "gone"), reply_to=message)
                else:
                    self.seen += masked
            replies.append(reply)
        return replies


def aggregated(uploads: list[list], examples: list[int], gone: int | None = None):
    """(mean of `uploads` weighted by `examples`, what the server got of each) through SecAgg+."""

    class Client(NumPyClient):
        def __init__(self, k):
            self.k = k

        def fit(self, parameters, config):
            return uploads[self.k], examples[self.k], {}

    def app(k: int) -> ClientApp:
        def client(context: Context):
            return Client(k).to_client()

        return ClientApp(client, mods=[secaggplus_mod])

    nodes = {k + 1: app(k) for k in range(len(uploads))}
    grid, manager = Here(nodes, None if gone is None else gone + 1), SimpleClientManager()
    for node in nodes:
        manager.register(Proxy(node))
    strategy = FedAvg(min_fit_clients=len(nodes), min_available_clients=len(nodes))
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), ServerConfig(1), strategy, manager)
    zeros = ndarrays_to_parameters([0 * array for array in uploads[0]])
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(zeros, True)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    limits = {"max_weight": float(max(examples)), "clipping_range": CLIP, "quantization_range": LEVELS}
    SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, timeout=60, **limits)(grid, context)
    found = compat.arrayrecord_to_parameters(context.state.array_records[MAIN_PARAMS_RECORD], True)
    return parameters_to_ndarrays(found), grid.seen


@pytest.fixture(autouse=True)
def running(monkeypatch):
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


@pytest.mark.parametrize("gone", [None, 2])
@pytest.mark.parametrize("name", ["fedavg", "factorized-fedavg", "feddecomp"])
def test_the_download_is_the_plain_one(name, gone):
    assert make(name).constant_mixing
    fed = ff.Federation(cnn, make_clients((1, 6, 6), SAMPLES), name, epochs=1, batch_size=5, lr=0.1, cohort=1)
    fed.fit(1)
    uploads = fed.uploads()
    weights = fed.method.weights(uploads)[0].double()
    examples = list(SAMPLES) if weights.unique().numel() > 1 else [1] * 4
    assert torch.allclose(weights, torch.tensor(examples, dtype=torch.float64) / sum(examples))
    left = [k for k in range(4) if k != gone]
    sent = [[uploads.state[tensor][k].double().reshape(-1).numpy() for tensor in fed.shared] for k in range(4)]
    found, seen = aggregated(sent, examples, gone)
    # A step of each client's numbers, and half a step of its weight, of what the clients' weights add up to.
    ratios = sum(examples[k] for k in left) / max(examples)
    atol = len(left) * (2 * CLIP + CLIP) / LEVELS / ratios
    for tensor, mean in zip(fed.shared, found, strict=True):
        rows, mean = uploads.state[tensor][left].double(), torch.from_numpy(mean).view(uploads.state[tensor].shape[1:])
        expected = torch.einsum("k,k...->...", weights[left] / weights[left].sum(), rows)
        torch.testing.assert_close(mean.double(), expected, rtol=0, atol=atol)
        if gone is None and uploads.state[tensor].is_floating_point():
            downloaded = fed.method.mix(uploads, [tensor])[tensor][0]
            torch.testing.assert_close(mean.double(), downloaded.double(), rtol=0, atol=atol)
    assert len(seen) == len(left) and len({row[0] for row in seen}) == len(left)
