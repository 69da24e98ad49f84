"""What a run keeps of its rounds besides accuracy and bytes, on request: the material of the papers' figures.

A recorder makes named tensors of a federation between two rounds. They go to `recorded/round-000001.safetensors` of the
run directory, a file a round, under "recorder/name"; a round that is run again writes the same file again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from fastfact.experiment import privacy
from fastfact.federation import Federation, analysis
from fastfact.federation.server import mixing
from fastfact.federation.state import State, flattened, generator_for
from fastfact.federation.storage.run_directory import save_tensors
from fastfact.methods.fedfac import SPLIT
from fastfact.methods.matching import Matched

FOLDER = "recorded"
CRITERIA = 100
"""How many Gaussian inputs the embeddings are of (SimFed, Figure 3)."""


@dataclass(frozen=True)
class Recorder:
    """make(federation) → named tensors, 0-dimensional for numbers; empty where the method has no such thing.

    when: after "every" round, the "last", or each "fifth" of them.
    """

    make: Callable[[Federation], dict[str, Tensor]]
    summary: str
    when: str = "every"

    def due(self, round: int, rounds: int) -> bool:
        """Whether it records after `round` of `rounds`."""
        if self.when == "fifth":
            return round in {max(1, round_of * rounds // 5) for round_of in range(1, 6)}
        return self.when == "every" or round == rounds


def _named(fed: Federation, roles: Iterable[str], layer: int | None = None) -> list[str]:
    wanted = set(roles)
    return [i.name for i in fed.infos.values() if i.role in wanted and not i.norm and layer in (None, i.layer)]


def _states(fed: Federation, names: Sequence[str] | None = None) -> State:
    return fed.states.load(range(len(fed)), names=names)


def _flat(state: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """The named tensors of each client end to end, float64 [k, n]."""
    return torch.cat([flattened(state[name]).double().cpu() for name in names], dim=1)


def similarity(fed: Federation) -> dict[str, Tensor]:
    """Cosine of u and of v of layer L − 1, and similarity of what the method compares, between all clients [K, K]."""
    layer = max((info.layers for info in fed.infos.values()), default=0) - 1
    names = {role: _named(fed, [role], layer) for role in ("u", "v")}
    cosines = {role: mixing.cosine(_states(fed, of)[of[0]]) for role, of in names.items() if of}
    if fed.key_names:
        keys = fed.key_vectors()
        cosines["key"] = fed.method.similarity(keys) if isinstance(fed.method, Matched) else mixing.cosine(keys)
    return cosines


def signal(fed: Federation) -> dict[str, Tensor]:
    """How well these similarities tell the groups of clients apart that the scenario has made, which nobody in the
    federation knows, see `analysis.separation`: "u/auc", "key/nearest" …"""
    groups = groups_of_clients(fed)
    return {
        f"{what}/{measure}": torch.tensor(value, dtype=torch.float64)
        for what, matrix in (similarity(fed).items() if groups else ())
        for measure, value in analysis.separation(matrix, groups).items()
    }


def groups_of_clients(fed: Federation) -> list[int]:
    """Which group each client is in; empty where the scenario makes none."""
    clients = privacy.clients_of(fed)
    groups = [client.group for client in clients if client.group is not None]
    return groups if len(groups) == len(clients) else []


def matching(fed: Federation) -> dict[str, Tensor]:
    """The weights [K, K] the next download is mixed with."""
    return {"weights": fed.mixing_matrix()} if fed.shared else {}


def drift(fed: Federation) -> dict[str, Tensor]:
    """(1/N) Σ_i ‖σ_i − σ̄‖₂ of what is shared and trained, after local training (FedDecomp §4.4)."""
    names = [name for name in fed.shared if not fed.infos[name].buffer]
    if not names:
        return {}
    squared = torch.zeros(len(fed), dtype=torch.float64)
    for tensor in _states(fed, names).values():
        flat = flattened(tensor).double()
        squared += (flat - flat.mean(0)).square().sum(1).cpu()
    return {"distance": squared.sqrt().mean()}


def movement(fed: Federation) -> dict[str, Tensor]:
    """Δσ = ‖σ̄ − σ⁰‖₂ of what is shared, Δτ = (1/N) Σ_i ‖τ_i − τ⁰‖₂ of the personal factors (FedDecomp §4.5).

    From the initial model on; the paper counts from the end of round 1.
    """
    before, now, moved = fed.initial, _states(fed), {}
    shared = [name for name in fed.shared if not fed.infos[name].buffer]
    personal = [name for name in _named(fed, ("A", "B")) if name not in shared]
    if shared:
        moved["shared"] = (_flat(now, shared).mean(0) - _flat(before, shared)[0]).norm()
    if personal:
        moved["personal"] = (_flat(now, personal) - _flat(before, personal)).norm(dim=1).mean()
    return moved


def updates(fed: Federation) -> dict[str, Tensor]:
    """‖d_1 / |d_1| − d_k / |d_k|‖₂, [K], where d_k is how far the weights, u or v of client k moved since the start."""
    before, now, distances = fed.initial, _states(fed), {}
    for what, roles in (("weight", ("weight",)), ("u", ("u",)), ("v", ("v",))):
        if names := [name for name in _named(fed, roles) if not fed.infos[name].classifier]:
            change = _flat(now, names) - _flat(before, names)
            change = change / change.norm(dim=1, keepdim=True).clamp(min=1e-30)
            distances[what] = (change - change[0]).norm(dim=1)
    return distances


def split(fed: Federation) -> dict[str, Tensor]:
    """Which channels of the split layers are shared, bool [channels of all of them] (FedFac)."""
    masks = [mask.cpu() for name, mask in sorted(fed.server_state.items()) if name.startswith(SPLIT)]
    return {"shared": torch.cat(masks)} if masks else {}


def masked(fed: Federation) -> dict[str, Tensor]:
    """Mean accuracy with the shared, and with the personal channels of the split layers replaced by random values.

    The values are normal with the layer's own deviation; "when updating the local models" (FedFac §5.5) is read as: in
    the trained models, before they are evaluated.
    """
    accuracy = {}
    masks = {name.removeprefix(SPLIT): mask for name, mask in fed.server_state.items() if name.startswith(SPLIT)}
    for what in ("shared", "personal") if masks else ():
        state = _states(fed)
        for name, mask in masks.items():
            tensor = state[name]
            rows = mask.to(tensor.device) if what == "shared" else ~mask.to(tensor.device)
            draw = torch.randn(
                tensor.shape, generator=generator_for(fed.settings["seed"], 0, -1, f"mask/{name}"), dtype=torch.float64
            )
            noise = draw.to(tensor) * tensor.flatten(1).std(1).view(-1, *[1] * (tensor.dim() - 1))
            rows = rows.repeat(tensor.shape[1] // len(rows)).view(1, -1, *[1] * (tensor.dim() - 2))
            state[name] = torch.where(rows, noise, tensor)
        accuracy[what] = torch.tensor(fed.accuracies(state), dtype=torch.float64).mean()
    return accuracy


def embeddings(fed: Federation) -> dict[str, Tensor]:
    """What each client's classifier sees of 100 inputs ~ N(0, I), [K, 100, d] (SimFed, Figure 3)."""
    x = privacy.clients_of(fed)[0].train[0]
    if not x.is_floating_point():
        return {}
    draw = generator_for(0, 0, -1, "embeddings")
    x = torch.randn((CRITERIA, *x.shape[1:]), generator=draw, dtype=torch.float64).to(x.dtype)
    return {"encoding": fed.encode(x)}


def neurons(fed: Federation) -> dict[str, Tensor]:
    """The mean output of each unit before the classifier on a client's own test samples, [K, units] (FedFac §1)."""
    outputs = [fed.encode(client.test[0], k)[0].double().mean(0) for k, client in enumerate(privacy.clients_of(fed))]
    return {"output": torch.stack(outputs)}


def features(fed: Federation) -> dict[str, Tensor]:
    """The feature maps of the first split layer (of the fifth convolution without a split) for client 1's first test
    image, [channels, h, w], and which of them are shared (FedFac, Figure 10)."""
    masks = {name: mask for name, mask in fed.server_state.items() if name.startswith(SPLIT)}
    convolutions = [i.name for i in fed.infos.values() if i.role == "weight" and len(i.shape) == 4]
    if not convolutions:
        return {}
    name = next(iter(masks), SPLIT + convolutions[min(4, len(convolutions) - 1)]).removeprefix(SPLIT)
    model, outputs = fed.models[0], []
    layer = model.get_submodule(name.rpartition(".")[0])
    handle = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    image = privacy.clients_of(fed)[0].test[0][:1].to(fed.device)
    with torch.no_grad():
        model(image)
    handle.remove()
    shared = masks.get(SPLIT + name, torch.ones(outputs[0].shape[1], dtype=torch.bool))
    return {"map": outputs[0][0], "shared": shared.cpu(), "image": image[0]}


def leaks(fed: Federation) -> dict[str, Tensor]:
    """PSNR [dB] of the images that DLG recovers from five training images of each client [5 K] (FedDecomp, Table 7)."""
    if not privacy.seen_by_server(fed) or not privacy.has_images(fed):
        return {}
    rows = privacy.leakage(fed, images=5, steps=300)
    return {"psnr": torch.tensor([row["psnr"] for row in rows], dtype=torch.float64)}


def labels(fed: Federation) -> dict[str, Tensor]:
    """How many training samples of each label every client has, [K, labels]."""
    return {"count": torch.stack([torch.bincount(c.train[1], minlength=fed.classes) for c in privacy.clients_of(fed)])}


def server(fed: Federation) -> dict[str, Tensor]:
    """Seconds that the server took to make the round's downloads."""
    return {"seconds": torch.tensor(fed.server_seconds)}


RECORDERS = {
    "similarity": Recorder(similarity, "cosine of u, of v and of the keys between all clients"),
    "signal": Recorder(signal, "how well they tell the scenario's groups of clients apart"),
    "matching": Recorder(matching, "the mixing matrix"),
    "drift": Recorder(drift, "mean distance of the shared tensors from their mean"),
    "updates": Recorder(updates, "distance of the clients' updates from those of client 1"),
    "split": Recorder(split, "which channels FedFac shares"),
    "server": Recorder(server, "seconds that the server took for the round"),
    "movement": Recorder(movement, "how far shared and personal tensors have gone", "last"),
    "masked": Recorder(masked, "accuracy with FedFac's shared or personal channels replaced by noise", "last"),
    "embeddings": Recorder(embeddings, "what the classifiers see of 100 Gaussian inputs", "last"),
    "neurons": Recorder(neurons, "mean output of the units before the classifier", "last"),
    "features": Recorder(features, "feature maps of a split layer", "last"),
    "leaks": Recorder(leaks, "PSNR of the training images an attacker recovers", "fifth"),
    "labels": Recorder(labels, "how many samples of each label the clients have", "last"),
}


def _path(directory: Path, round: int) -> Path:
    return directory / FOLDER / f"round-{round:06d}.safetensors"


def write(fed: Federation, names: Iterable[str], rounds: int, directory: Path) -> None:
    """Record what is due after the federation's present round of `rounds`, unless it is there."""
    due = [name for name in names if fed.round and RECORDERS[name].due(fed.round, rounds)]
    path = _path(directory, fed.round)
    if not due or path.exists():
        return
    tensors = {f"{name}/{key}": t for name in due for key, t in RECORDERS[name].make(fed).items()}
    tensors = {key: (t.float() if t.dtype == torch.float64 else t).cpu().contiguous() for key, t in tensors.items()}
    save_tensors(path, tensors)


def forget(directory: Path, round: int) -> None:
    """Remove what was recorded after rounds later than `round`: they will be run again."""
    for path in (directory / FOLDER).glob("round-*.safetensors"):
        if int(path.stem.removeprefix("round-")) > round:
            path.unlink()


def read(directory: Path) -> dict[str, dict[int, np.ndarray]]:
    """ "recorder/name" → round → array, of a run directory."""
    arrays: dict[str, dict[int, np.ndarray]] = {}
    for path in sorted((directory / FOLDER).glob("round-*.safetensors")):
        for name, array in load_file(path).items():
            arrays.setdefault(name, {})[int(path.stem.removeprefix("round-"))] = array
    return arrays
