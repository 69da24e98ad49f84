"""What crosses the wire: the message format, and what the receiver gets out of it.

A message is one client's tensors of one round in one direction. Both sides know the model, so tensors go by their
index in its table of names:

    "FF", version (u8), 0 (u8), number of tensors (u32)                      8 bytes
    then for each: index (u16), encoding (u8), payload length (u32)          7 bytes, and the payload

all little-endian. Encodings of the payload, elements in row-major order:

    0  the numbers as they are                 3  bitmap, then the nonzeros as they are (float32 or bfloat16)
    1  bfloat16                                4  bitmap, then the nonzeros as bfloat16
    2  int8, after a float32 scale per row     5  bitmap, then a float32 scale per row, then the nonzeros as int8

A row is the first axis of the tensor (one row if it has one axis or none). μ goes as a bitmap wherever that is shorter.
Several of a tensor, where the receiver knows that they come so, are one tensor with one axis more, in front.
Where only some slices along the first axis travel, 8 is added to the encoding and the payload begins with one bit for
each, eight to a byte, lowest first.
"""

import dataclasses
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fastfact import ops
from fastfact.base.formats import quantized
from fastfact.base.settings import WIRE
from fastfact.federation.state import State, as_bytes, flattened
from fastfact.federation.tensors import TensorInfo
from fastfact.federation.wire.ledger import FRAME, Sizes

HEADER = struct.Struct("<2sBBI")
ENTRY = struct.Struct("<HBI")
RAW, BF16, INT8, BITMAP, BITMAP_BF16, BITMAP_INT8 = range(6)
SOME_ROWS = 8
_BITMAP_TYPES = {BITMAP: torch.float32, BITMAP_BF16: torch.bfloat16, BITMAP_INT8: torch.int8}
EXACT_BITMAP = (torch.float32, torch.bfloat16)


REPLY = "(reply)"


def reply(count: int) -> Sizes:
    """One message of `count` float32 numbers that are no tensor of the model."""
    return Sizes({REPLY: [4 * count], FRAME: [HEADER.size]}, {REPLY: [count]})


class Wire:
    """Encodes float tensors as `values` says: "exact" in their own dtype, "bfloat16", or "int8" with a scale per row.

    Integer tensors are always exact, and those named in `exact`. Raises ValueError for an unknown `values`.
    """

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        values: str = "exact",
        sparse: Iterable[str] = (),
        exact: Iterable[str] = (),
    ):
        if values not in WIRE:
            raise ValueError(f"wire={values!r}, must be one of {', '.join(WIRE)}")
        self.infos, self.values, self.sparse = infos, values, frozenset(sparse)
        self.exact = frozenset(exact)
        self.names = list(infos)
        if len(self.names) > 0xFFFF:
            raise ValueError(f"the model has {len(self.names)} tensors, the wire format allows {0xFFFF}")
        self.index = {name: n for n, name in enumerate(self.names)}

    def _plain(self, info: TensorInfo) -> int:
        if self.values == "exact" or info.name in self.exact or not info.dtype.is_floating_point:
            return RAW
        return BF16 if self.values == "bfloat16" else INT8

    def _bitmap(self, info: TensorInfo) -> int | None:
        if info.name not in self.sparse or (self.values == "exact" and info.dtype not in EXACT_BITMAP):
            return None
        if self.values == "exact":
            return BITMAP if info.dtype == torch.float32 else BITMAP_BF16
        return BITMAP_BF16 if self.values == "bfloat16" else BITMAP_INT8

    def _length(self, info: TensorInfo, encoding: int, nonzeros: int) -> int:
        rows, columns = _matrix_shape(info.shape)
        n = rows * columns
        bitmap = rows * ((columns + 7) // 8)
        return {
            RAW: n * info.dtype.itemsize,
            BF16: 2 * n,
            INT8: n + 4 * rows,
            BITMAP: bitmap + 4 * nonzeros,
            BITMAP_BF16: bitmap + 2 * nonzeros,
            BITMAP_INT8: bitmap + 4 * rows + nonzeros,
        }[encoding]

    def _numbers(self, info: TensorInfo, encoding: int, length: int, decoded: Tensor) -> int:
        """How many numbers a payload of `length` bytes has: those of a bitmap, of which int8 may make zeros, count."""
        none, one = (self._length(info, encoding, n) for n in (0, 1))
        if one > none:
            return (length - none) // (one - none)
        return int(decoded.count_nonzero()) if info.name in self.sparse else info.numel

    def _choose(self, info: TensorInfo, nonzeros: int) -> tuple[int, int]:
        """(encoding, payload length)."""
        plain, bitmap = self._plain(info), self._bitmap(info)
        length = self._length(info, plain, nonzeros)
        if bitmap is not None and (packed := self._length(info, bitmap, nonzeros)) < length:
            return bitmap, packed
        return plain, length

    def roundtrip(
        self, state: State, names: Sequence[str], rows: Mapping[str, Tensor] | None = None
    ) -> tuple[State, Sizes]:
        """What the receiver has of the named tensors [m, …] of m messages, and their sizes.

        rows: name → bool, which slices along the first axis travel; the others are in the result as they were.
        Equal to encoding and decoding every message, but no bytes are made: exact tensors arrive as they are.
        """
        received, sizes = {}, Sizes()
        for name in names:
            info, tensor, mask = self.infos[name], state[name], (rows or {}).get(name)
            if tuple(tensor.shape[2:]) == info.shape and tensor.dim() > 1 + len(info.shape):
                info = _several(info, tensor.shape[1])
            begin = ENTRY.size
            if mask is not None:
                begin += (len(mask) + 7) // 8
                info, tensor = _some_rows(info, mask), tensor[:, mask]
            m = len(tensor)
            nonzeros = flattened(tensor).count_nonzero(1).tolist() if name in self.sparse else [info.numel] * m
            length = {count: begin + self._choose(info, count)[1] for count in set(nonzeros)}
            sizes.bytes[name] = [length[count] for count in nonzeros]
            sizes.numbers[name] = nonzeros
            received[name] = self._lossy(tensor, info)
            if mask is not None:
                received[name] = state[name].index_copy(1, mask.nonzero().flatten(), received[name])
        sizes.bytes[FRAME] = [HEADER.size] * len(next(iter(received.values()), ()))
        return received, sizes

    def _lossy(self, tensor: Tensor, info: TensorInfo) -> Tensor:
        plain = self._plain(info)
        if plain == RAW:
            return tensor
        if plain == BF16:
            return tensor.to(torch.bfloat16).to(tensor.dtype)
        rows = tensor.reshape(len(tensor), *_matrix_shape(info.shape))
        quantized, scale = _quantize(rows)
        return (quantized.float() * scale.unsqueeze(-1)).to(tensor.dtype).reshape(tensor.shape)

    def encode(self, tensors: Mapping[str, Tensor], rows: Mapping[str, Tensor] | None = None) -> bytes:
        """One message of one client's tensors, without the client axis, of each one or several [n, …]. rows: see
        `roundtrip`."""
        parts = [HEADER.pack(b"FF", 1, 0, len(tensors))]
        for name, tensor in tensors.items():
            info, tensor = self.infos[name], tensor.detach().cpu()
            if tuple(tensor.shape[1:]) == info.shape and tensor.dim() > len(info.shape):
                info = _several(info, len(tensor))
            if tuple(tensor.shape) != info.shape:
                raise ValueError(f"message: {name} has shape {list(tensor.shape)}, must be {list(info.shape)}")
            mask, which = (rows or {}).get(name), b""
            if mask is not None:
                mask = mask.cpu()
                info, tensor = _some_rows(info, mask), tensor[mask]
                which = np.packbits(mask.numpy(), bitorder="little").tobytes()
            encoding, length = self._choose(info, int(tensor.count_nonzero()))
            payload = which + b"".join(map(_bytes, self._payload(tensor, info, encoding)))
            assert len(payload) == len(which) + length
            flag = 0 if mask is None else SOME_ROWS
            parts += [ENTRY.pack(self.index[name], encoding + flag, len(payload)), payload]
        return b"".join(parts)

    def _payload(self, tensor: Tensor, info: TensorInfo, encoding: int) -> list[Tensor]:
        rows = tensor.reshape(_matrix_shape(info.shape))
        if encoding == RAW:
            return [tensor]
        if encoding == BF16:
            return [tensor.to(torch.bfloat16)]
        if encoding == INT8:
            quantized, scale = _quantize(rows)
            return [scale, quantized]
        bits, values, scale = ops.pack_bitmap(rows, _BITMAP_TYPES[encoding])
        return [bits, scale, values]

    def decode(
        self,
        message: bytes,
        onto: Mapping[str, Tensor] | None = None,
        names: Iterable[str] | None = None,
        several: Collection[str] = (),
        sizes: Sizes | None = None,
    ) -> dict[str, Tensor]:
        """The tensors of a message (of these only `names`, if given); rows that did not travel are those of `onto`, or
        zero. several: the names of those that come as any number of them, [n, …]. sizes: gets the message's.

        Raises ValueError for a message that is cut short or does not fit the model.
        """
        view, count, at = memoryview(message), count_of(message), HEADER.size
        tensors, wanted = {}, None if names is None else frozenset(names)
        seen: set[int] = set()
        if sizes is not None:
            sizes.bytes[FRAME] = [HEADER.size]
        for _ in range(count):
            if len(view) < at + ENTRY.size:
                raise ValueError("message: cut short")
            index, encoding, length = ENTRY.unpack(view[at : at + ENTRY.size])
            at += ENTRY.size
            some, encoding = divmod(encoding, SOME_ROWS)
            if index >= len(self.names) or some > 1 or encoding > BITMAP_INT8 or len(view) < at + length:
                raise ValueError("message: cut short or damaged")
            if index in seen:
                raise ValueError(f"message: {self.names[index]} comes twice")
            seen.add(index)
            info, payload = self.infos[self.names[index]], view[at : at + length]
            if wanted is not None and info.name not in wanted:
                at += length
                continue
            if not some:
                if info.name in several:
                    info = _several(info, _count(length, info, encoding))
                part = tensors[info.name] = _decode(payload, info, encoding)
            else:
                if not info.shape:
                    raise ValueError(f"message: {info.name} is a scalar, some of its rows cannot travel")
                n = info.shape[0]
                width = (n + 7) // 8
                if length < width:
                    raise ValueError(f"message: {info.name} is cut short")
                bits = np.frombuffer(payload[:width], np.uint8)
                mask = torch.from_numpy(np.unpackbits(bits, count=n, bitorder="little").astype(bool))
                base = onto[info.name].cpu() if onto else torch.zeros(info.shape, dtype=info.dtype)
                info, payload = _some_rows(info, mask), payload[width:]
                part = _decode(payload, info, encoding)
                tensors[info.name] = base.index_copy(0, mask.nonzero().flatten(), part)
            if sizes is not None:
                sizes.bytes[info.name] = [ENTRY.size + length]
                sizes.numbers[info.name] = [self._numbers(info, encoding, len(payload), part)]
            at += length
        if at != len(view):
            raise ValueError(f"message: {len(view) - at} bytes follow its last tensor")
        return tensors


def _several(info: TensorInfo, n: int) -> TensorInfo:
    """n of a tensor, one after another."""
    return dataclasses.replace(info, shape=(n, *info.shape))


def _count(length: int, info: TensorInfo, encoding: int) -> int:
    """How many of a tensor a payload of `length` bytes holds, rounded down: what does not fit is found later."""
    one = {RAW: info.numel * info.dtype.itemsize, BF16: 2 * info.numel, INT8: info.numel + 4}.get(encoding)
    return length // one if one else 1


def _some_rows(info: TensorInfo, mask: Tensor) -> TensorInfo:
    """The tensor that is left of some rows."""
    return dataclasses.replace(info, shape=(int(mask.sum()), *info.shape[1:]))


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = shape[0] if len(shape) > 1 else 1
    n = torch.Size(shape).numel()
    return rows, n // rows if rows else 0


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., rows, n] and float32 [..., rows], as `ops.pack_bitmap` quantizes."""
    if not rows.shape[-1]:
        return rows.to(torch.int8), rows.new_zeros(rows.shape[:-1], dtype=torch.float32)
    values, scale = quantized(rows.float().flatten(0, -2))
    return values.reshape(rows.shape), scale.reshape(rows.shape[:-1])


def _bytes(tensor: Tensor) -> bytes:
    return as_bytes(tensor.contiguous()).numpy().tobytes()


def count_of(message: bytes) -> int:
    """How many tensors a message says it has. Raises ValueError for one that is none."""
    if len(message) < HEADER.size or bytes(message[:2]) != b"FF" or message[2] != 1 or message[3] != 0:
        raise ValueError("message: not a message of this version")
    return HEADER.unpack(message[: HEADER.size])[3]


def _decode(payload: memoryview, info: TensorInfo, encoding: int) -> Tensor:
    if encoding != RAW and not info.dtype.is_floating_point:
        raise ValueError(f"message: {info.name} is {info.dtype}, which travels as it is")
    rows, columns = _matrix_shape(info.shape)
    lengths = {RAW: info.numel * info.dtype.itemsize, BF16: 2 * info.numel, INT8: info.numel + 4 * rows}
    if lengths.get(encoding, len(payload)) != len(payload):
        raise ValueError(f"message: {info.name} has {len(payload)} bytes, must have {lengths[encoding]}")

    def read(start: int, count: int, dtype: torch.dtype) -> Tensor:
        stop = start + count * dtype.itemsize
        if stop > len(payload):
            raise ValueError(f"message: {info.name} is cut short")
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(bytearray(payload[start:stop]), dtype=dtype)

    if encoding == RAW:
        return read(0, info.numel, info.dtype).reshape(info.shape)
    if encoding == BF16:
        return read(0, info.numel, torch.bfloat16).to(info.dtype).reshape(info.shape)
    if encoding == INT8:
        scale = read(0, rows, torch.float32)
        quantized = read(4 * rows, info.numel, torch.int8).reshape(rows, columns)
        return (quantized.float() * scale[:, None]).to(info.dtype).reshape(info.shape)
    width = (columns + 7) // 8
    bits = read(0, rows * width, torch.uint8).reshape(rows, width)
    at, scale = rows * width, torch.empty(0)
    if encoding == BITMAP_INT8:
        scale = read(at, rows, torch.float32)
        at += 4 * rows
    dtype = _BITMAP_TYPES[encoding]
    if (len(payload) - at) % dtype.itemsize:
        raise ValueError(f"message: {info.name} has {len(payload)} bytes, which ends within a number")
    values = read(at, (len(payload) - at) // dtype.itemsize, dtype)
    return ops.unpack_bitmap(bits, values, scale, columns).to(info.dtype).reshape(info.shape)
