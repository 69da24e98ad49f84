"""What uploads give away of the training images: gradient inversion, as FedDecomp evaluates it (§4.6, Table 7).

Deep Leakage from Gradients (DLG; Zhu, Liu and Han, NeurIPS 2019): an attacker who has seen a gradient looks for an
input and a label whose gradient is the same.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfact.base.kinds import type_error
from fastfact.federation import Client, Federation
from fastfact.federation.client.placement import placed
from fastfact.federation.state import generator_for
from fastfact.federation.tensors import first_number, tensors_of
from fastfact.nn.convert import factorized_layers

Gradients = dict[str, Tensor]


def gradients(
    model: nn.Module, x: Tensor, y: Tensor, names: Sequence[str] | None = None, *, differentiable: bool = False
) -> Gradients:
    """The gradient of the mean cross-entropy of model(x) and y for the named parameters (all that train by default).

    y: int64 [n], or probabilities [n, classes]. differentiable: by x and y (through compact layers it is not).
    """
    named = {n: p for n, p in model.named_parameters() if (p.requires_grad if names is None else n in names)}
    loss = F.cross_entropy(model(x), y)
    found = torch.autograd.grad(
        loss, list(named.values()), create_graph=differentiable, allow_unused=True, materialize_grads=True
    )
    return dict(zip(named, found, strict=True))


def invert(
    model: nn.Module,
    seen: Mapping[str, Tensor],
    shape: Sequence[int],
    classes: int,
    *,
    steps: int = 100,
    tries: int = 1,
    masks: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, float]:
    """DLG: x′ [n, …] of `shape` and probabilities y′ [n, classes] that minimise Σ_p ‖∇_p ℓ(x′, y′) − seen_p‖².

    seen: gradients by the name of the parameter. masks: name → bool, the entries of it that were seen (default: all).
    x′ and the logits of y′ start as standard normal draws and are moved by at most `steps` steps of L-BFGS (history
    100), as in DLG but with a line search (strong Wolfe), without which it diverges on networks with ReLU. Starts that
    take to a wrong label end far away: of `tries` starts the best point met is returned, with its distance (the sum
    above divided by Σ_p ‖seen_p‖²). A distance below 1e-6 is taken for an answer, no further start is made.

    Works on the model in the mode it is in; its modules must be differentiable twice. Raises ValueError for a name that
    is no parameter and for gradients that are all zero.
    """
    parameters = dict(model.named_parameters())
    if unknown := sorted(set(seen) - set(parameters)):
        raise ValueError(f"invert(seen[{unknown[0]!r}]): the model has no such parameter")
    masks = masks or {}
    scale = sum(_seen(g, masks.get(n)).double().square().sum() for n, g in seen.items())
    if not scale > 0:
        raise ValueError("invert(seen=): every gradient is zero, there is nothing to follow")
    like = next(iter(seen.values()))
    best: tuple[Tensor, Tensor, float] | None = None
    for _ in range(tries):
        x, logits = (
            torch.randn(size, generator=generator, dtype=torch.float64).to(like).requires_grad_()
            for size in (tuple(shape), (shape[0], classes))
        )
        optimizer = torch.optim.LBFGS([x, logits], max_iter=steps, history_size=100, line_search_fn="strong_wolfe")

        def closure(x=x, logits=logits) -> Tensor:
            nonlocal best
            now = gradients(model, x, logits.softmax(-1), list(seen), differentiable=True)
            error = sum(_seen(now[n] - g, masks.get(n)).square().sum() for n, g in seen.items())
            distance = error / scale.to(error)
            x.grad, logits.grad = torch.autograd.grad(distance, [x, logits])
            if best is None or distance.item() < best[2]:
                best = x.detach().clone(), logits.detach().softmax(-1), distance.item()
            return distance

        optimizer.step(closure)
        if best is not None and best[2] < 1e-6:
            break
    assert best is not None  # the closure has run
    return best


def _seen(gradient: Tensor, mask: Tensor | None) -> Tensor:
    return gradient if mask is None else gradient * mask.view(-1, *[1] * (gradient.dim() - 1))


def psnr(x: Tensor, target: Tensor) -> Tensor:
    """−10 · log₁₀(‖x − x*‖² / (m · n)) in dB for each image [n, c, m, n] in 0 … 1 (FedDecomp, §4.6): float64 [n].

    As printed: the error is summed over the c channels, so that with three it is 4.8 dB below the usual mean over all
    numbers. Raises ValueError for shapes that differ or are no images.
    """
    if x.shape != target.shape or x.dim() != 4:
        raise ValueError(f"psnr: {list(x.shape)} and {list(target.shape)}, must be two stacks of images [n, c, h, w]")
    error = (x.double() - target.double()).square().flatten(1).sum(1) / (x.shape[2] * x.shape[3])
    return -10 * error.log10()


def leakage(
    federation: Federation,
    images: int = 5,
    *,
    clients: Sequence[int] | None = None,
    steps: int = 100,
    tries: int = 1,
    knows: str = "shared",
) -> list[dict[str, Any]]:
    """Attack the first `images` training images (in a drawn order) of each client as it stands, one after another.

    The attacker has, for one image at a time, the gradients of the parameters that the client uploads (for FedFac, the
    rows that travel), as §4.6 of FedDecomp assumes. knows: "shared", it has what the client uploaded of its model, and
    the initial model for the rest; "all", it has the client's model. The paper does not say. It decides the order of
    Table 7: the gradient of σ is that of W itself, so that with "all" FedDecomp gives away what FedAvg does.

    Batch-norm runs with the running statistics the attacker has. What it knows of x is the range: x′ is cut to the
    least and largest value of each channel of the client's training samples, which are 0 and 1 of the PSNR. steps,
    tries: see `invert`; DLG makes 300 and 1.

    Returns a row for each image: client, image (its place among the training samples), psnr (dB), distance (what is
    left of the objective of `invert`), label (whether the largest probability of y′ is the true one). Table 7 are mean
    and maximum of psnr. Raises ValueError if nothing that trains is uploaded, or the samples are no images.
    """
    members = clients_of(federation)
    if knows not in ("shared", "all"):
        raise ValueError(f"leakage(knows={knows!r}): must be shared or all")
    for name, value in (("images", images), ("steps", steps), ("tries", tries)):
        if type_error(value, int) or value < 1:
            raise ValueError(f"leakage({name}={value!r}): must be an integer of at least 1")
    known = range(len(federation))
    if clients is not None and (bad := [k for k in clients if k not in known]):
        raise ValueError(f"leakage(clients={list(clients)}): {bad[0]} must be 0 … {len(federation) - 1}")
    names = seen_by_server(federation)
    if not names:
        raise ValueError(f"leakage: {federation.method.name} uploads nothing that trains")
    dtype = first_number(federation.template).dtype
    masks = federation.method.channel_masks("up", federation.server_state)
    rows = []
    for k in known if clients is None else clients:
        x, y = placed(members[k].train, federation.device, dtype)
        classes = federation.classes
        if classes is None:
            raise ValueError("leakage: the clients have no class labels, which the attack finds")
        if not has_images(federation):
            raise ValueError(f"leakage: the samples are {x.dtype} {list(x.shape[1:])}, must be images (c, h, w)")
        model = federation.models[k]
        for layer in factorized_layers(model).values():
            layer.path = "reconstruct"
        attacked = model if knows == "all" else _as_seen(federation, model)
        low, high = x.amin((0, 2, 3), keepdim=True), x.amax((0, 2, 3), keepdim=True)
        width = (high - low).clamp(min=1e-12)
        draw = generator_for(federation.settings["seed"], federation.round, k, "leakage")
        for place in torch.randperm(len(y), generator=draw)[:images].tolist():
            one, label = x[place : place + 1], y[place : place + 1]
            seen = {name: g.detach() for name, g in gradients(model, one, label, names).items()}
            found, odds, distance = invert(
                attacked, seen, one.shape, classes, steps=steps, tries=tries, masks=masks, generator=draw
            )
            found = found.clamp(low, high)
            rows.append(
                {
                    "client": k,
                    "image": place,
                    "psnr": psnr((found - low) / width, (one - low) / width).item(),
                    "distance": distance,
                    "label": odds.argmax().item() == label.item(),
                }
            )
    return rows


def seen_by_server(federation: Federation) -> list[str]:
    """The names of the parameters that train and are uploaded, whose gradients an attacker has."""
    parameters = {name for name, p in federation.template.named_parameters() if p.requires_grad}
    return [name for name in federation.uploaded if name in parameters]


def clients_of(federation: Federation) -> Sequence[Client]:
    """Its clients. Raises ValueError for a federation that was loaded without them."""
    if federation.clients is None:
        raise ValueError("this federation was loaded without clients, pass Federation.load(DIR, clients=)")
    return federation.clients


def has_images(federation: Federation) -> bool:
    """Whether the clients' samples are images (c, h, w) of floating-point numbers."""
    x = clients_of(federation)[0].train[0]
    return x.dim() == 4 and x.is_floating_point()


def _as_seen(federation: Federation, model: nn.Module) -> nn.Module:
    """The initial model with the tensors that a client's `model` uploads in their places."""
    attacked = copy.deepcopy(model)
    for name, tensor in tensors_of(attacked).items():
        if name not in federation.uploaded:
            tensor.data.copy_(federation.initial[name][0])
    return attacked
