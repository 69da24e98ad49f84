"""The weight that a layer makes once in evaluation and keeps while its factors are what they were.

PyTorch does not count every write to a tensor: those through `.data`, numpy or a pointer go unseen. So a kept weight
serves only if the digest of all numbers of all factors (`torch.ops.fastfact.digest`) is what it was when the weight was
made. To read the factors takes a fraction of the time in which a weight is made and written. What is asked in every
forward of a small layer is a `direct.Watch`, which reads as much, and has less before it.

Numbers that nothing can write to where they lie need not be read again. `hold` lets PyTorch copy a tensor on the first
write (as `torch._lazy_clone` does): whatever asks PyTorch for memory to write to, through `.data`, a view, numpy or
`data_ptr()`, finds the numbers in other memory, which a `Watch` sees. Only who had asked before could write unseen, so
tensors that share their memory with something else, as with a numpy array, are read each time, and an operation of
another thread that is under way tells by the version when it ends (through `.data` it has none, and goes unseen).

On a GPU no number is read, for which the processor would have to wait: a kept weight serves while every factor is held
so, lies where it lay and has the version that it had. (Of PyTorch's own operations the `_foreach` ones alone write to
what is held without moving it; the version tells, unless they are given `.data`: then `train()` or `eval()` has W made
anew.) A layer that was recorded into a CUDA graph, which would go on with the old memory, keeps nothing there.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfact.ops import direct
from fastfact.ops.backends import PLAIN, loaded
from fastfact.ops.common import capturing, has_tangents, transforming

AXES = 8
"""The most axes of a tensor that a `Watch` is of."""
LEAST = 1 << 12
"""Bytes of a tensor that is held."""
MOVES = 4
"""How often tensors may be moved for no other numbers before they are held no more."""


def allowed(casting: bool = False) -> bool:
    """Whether a weight may be kept, and serve: nothing traces, casts, dispatches elsewhere or asks for gradients.

    casting: whether it may be once autocast is off.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    # Asked before every layer of a network: these take a third of the time of their public forms.
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return False
    if torch._C._is_any_autocast_enabled() and not casting:
        return False
    return loaded("cpu") and not (capturing() or has_tangents())


def hold(tensor: Tensor, others: int = 0) -> object | None:
    """What keeps the numbers of a plain tensor where they lie: a write moves it to other memory while this lives. None
    where that does not pay, or more than so many others have its memory."""
    lazy, sharing = getattr(torch, "_lazy_clone", None), getattr(torch._C, "_storage_Use_Count", None)
    if lazy is None or sharing is None or transforming():
        return None
    storage, least = tensor.untyped_storage(), LEAST if tensor.is_cpu else 1
    # One that was read from a file has no allocator, which a write would ask for other memory: see `settle`.
    if (
        not storage.resizable()
        or storage.nbytes() < least
        or storage.nbytes() != tensor.nbytes
        or sharing(storage._cdata) > 2 + others
    ):
        return None
    try:
        with torch.no_grad():
            held = lazy(tensor.detach())
    except RuntimeError:  # of memory that is not PyTorch's own
        return None
    return direct.hold(held) if tensor.is_cpu else held


def settle(tensor: Tensor) -> None:
    """Have a tensor that was read from a file (`torch.load`), which cannot be held, in memory that can. Nobody may use
    it meanwhile."""
    lazy, sharing = getattr(torch, "_lazy_clone", None), getattr(torch._C, "_storage_Use_Count", None)
    if lazy is None or sharing is None or type(tensor) not in PLAIN or not tensor.is_cpu:
        return
    storage = tensor.untyped_storage()
    if storage.resizable() or not LEAST <= storage.nbytes() == tensor.nbytes or sharing(storage._cdata) > 2:
        return
    with torch.no_grad():
        copy = tensor.detach().clone()
        try:
            lazy(tensor.detach())  # leaves a storage that no write may meet: it goes at once
        except RuntimeError:
            return  # numpy's, or shared with other processes, who see what is written there
        tensor.data = copy


def watch(tensors: Sequence[Tensor], others: int = 0, holds: bool = True) -> direct.Watch | None:
    """A `Watch` of these tensors, None where there can be none. others: tensors that are known to share the memory of
    each. holds: whether their memory is held where it can be."""
    if not all(tensor.dim() <= AXES and _is_dense(tensor) for tensor in tensors):
        return None
    read = _on_cpu(tensors)
    if not read and not (holds and _on_gpu(tensors)):
        return None
    held, versions = [], []
    for tensor in tensors:
        # Before it is held: an operation that writes meanwhile counts when it ends.
        version = _version(tensor)
        one = hold(tensor, others) if holds else None
        if not read and (one is None or version is None):
            return None
        held.append(tensor.detach() if one is None else one)
        versions.append(-1 if one is None or version is None else version)
    noted = direct.watch(tuple(tensors), tuple(versions))
    return noted and direct.Watch(noted, tuple(tensors), tuple(held))


def _on_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


def _on_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on one GPU and have numbers."""
    return all(tensor.is_cuda and tensor.numel() and tensor.device == tensors[0].device for tensor in tensors)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


class Kept(NamedTuple):
    """What was made from `factors` while their numbers had this digest, on a GPU while this `Watch` finds them as they
    were: a value for each key that was asked for."""

    factors: Sequence[Tensor]
    digest: int | direct.Watch
    values: dict[Hashable, object]

    def is_of_now(self) -> bool:
        """Whether the numbers are what they were."""
        if isinstance(self.digest, direct.Watch):
            return direct.still(self.digest)
        return digest_of(self.factors) == self.digest

    def value(self, key: Hashable, make: Callable[[], object]) -> object:
        """The value for `key`: kept, or make(), which is then kept. make() must depend on nothing but the factors and
        what is in the key. What is made while a factor changes is not kept."""
        if key in self.values:
            return self.values[key]
        versions = list(map(_version, self.factors))
        value = make()
        if isinstance(self.digest, direct.Watch):
            # it may serve on another stream next
            torch.cuda.current_stream(self.factors[0].device).synchronize()
        if list(map(_version, self.factors)) == versions and self.is_of_now():
            self.values[key] = value
        return value


class WeightCache:
    """What was made from the factors of one layer as they were last. Threads may share it: it is read once and swapped
    in whole. A copy of it, by `copy` or `pickle`, is empty.
    """

    def __init__(self) -> None:
        self._kept: Kept | None = None
        self.recorded = False
        """Whether a CUDA graph reads the factors where they lie."""
        self._watch: direct.Watch | None = None
        self._last: tuple[Hashable, direct.Watch, object] | None = None
        self._asked: tuple[object, Hashable] | None = None
        self._moves = 0

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept = self._watch = self._last = self._asked = None
        self._moves = 0

    def read_anew(self) -> None:
        """Let what is kept serve only once the factors were read again."""
        self._watch = self._last = self._asked = None
        self._moves = 0
        if self._kept is not None and isinstance(self._kept.digest, direct.Watch):
            self._kept = None

    def note_recording(self) -> None:
        """The factors are recorded into a CUDA graph, which reads them, or writes to them, where they lie now."""
        self.clear()
        self.recorded = True

    def __len__(self) -> int:
        return self._kept is not None and len(self._kept.values)

    def __reduce__(self):
        return WeightCache, ()

    def of(self, factors: Sequence[Tensor]) -> Kept | None:
        """What is kept for factors with these numbers, empty if they are others than before. None where some are no
        plain tensors on the CPU or, held, on a GPU."""
        if any(type(factor) not in PLAIN for factor in factors):
            return None
        if not _on_cpu(factors):
            return self._of_gpu(factors)
        kept, watch = self._kept, self._watch
        if kept is not None and watch is not None and _same(kept.factors, factors) and _same(watch.tensors, factors):
            if direct.still(watch):
                return kept
            self._watch = None
            self._moves += 1
        digest = digest_of(factors)
        if kept is not None and kept.digest == digest and _same(kept.factors, factors):
            return kept
        values = kept.values if kept is not None and kept.digest == digest else {}
        self._kept = kept = Kept(factors, digest, values)
        return kept

    def _of_gpu(self, factors: Sequence[Tensor]) -> Kept | None:
        kept = self._kept
        if self.recorded or self._moves > MOVES:
            return None
        if kept is not None and _same(kept.factors, factors) and isinstance(kept.digest, direct.Watch):
            if direct.still(kept.digest):
                return kept
            # Who asks for memory to write to in each call would have it copied each time.
            self._moves += 1
        self._kept = None
        found = watch(factors)
        if found is not None:
            self._kept = Kept(factors, found, {})
        return self._kept

    def watch(self, kept: Kept) -> direct.Watch | None:
        """What tells whether the numbers that `kept` is of are others, the same one as long as they are not. None where
        they are, or nothing can tell."""
        if isinstance(kept.digest, direct.Watch):
            return kept.digest if kept.is_of_now() else None
        found = self._watch
        same = found is not None and _same(found.tensors, kept.factors)
        if not same or not direct.still(found):
            # Who asks for memory to write to in each call would have it copied each time.
            self._moves += same
            found = self._watch = None
            found = watch(kept.factors, holds=self._moves <= MOVES)
        # It must be of the numbers that `kept` is of, and these may change meanwhile.
        if found is None or digest_of(kept.factors) != kept.digest or not direct.still(found):
            return None
        self._watch = found
        return found

    def value(
        self, factors: Sequence[Tensor], key: Hashable, make: Callable[[], object], again: bool = False
    ) -> object:
        """`Kept.value` for factors with these numbers, None where nothing can be kept; the last one is found by its
        `Watch`. again: None the first time that it is asked for, so that what is looked at once takes no memory."""
        last = self._last
        if last is not None and last[0] == key and _same(last[1].tensors, factors) and direct.still(last[1]):
            return last[2]
        if (kept := self.of(factors)) is None:
            return None
        asked = kept.digest.noted if isinstance(kept.digest, direct.Watch) else kept.digest, key
        if again and key not in kept.values and self._asked != asked:
            self._asked = asked
            return None
        value = kept.value(key, make)
        if found := self.watch(kept):
            self._last = key, found, value
        return value


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def digest_of(tensors: Sequence[Tensor]) -> int:
    """Of the numbers of all these tensors (`torch.ops.fastfact.digest`)."""
    return torch.ops.fastfact.digest.default(tensors)


def _version(tensor: Tensor) -> int | None:
    """How many operations wrote to it; None for one of inference mode, where none counts."""
    return None if tensor.is_inference() else tensor._version
