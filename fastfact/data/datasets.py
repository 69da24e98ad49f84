"""Data sets by name, each one pool of samples; the scenarios split it over clients, and into train and test.

Nothing is downloaded here. A data set that is not there is an error that says what to get and where to put it.
"""

import csv
import gzip
import importlib.util
import json
import math
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = "FASTFACT_DATA"
"""Environment variable with the folder of the data sets; without it they are looked for in `data`."""

Groups = Mapping[str, tuple[int, ...]]
"""Name of a domain → the labels that belong to it."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples `x` [n, …] with labels `y`, int64 [n] in 0 … len(classes) − 1; `classes` are the labels' names.

    x is float32 ready for a model; or uint8 images [n, c, h, w] with `scale` = (mean, deviation) of each channel in
    0 … 1; or tokens of any integer dtype [n, length] with `vocabulary`, the number of different tokens.
    owner: int64 [n], who wrote or said each sample, an index into `owners`; for the natural scenario.
    domains, superclasses: labels that belong together; for the scenarios of these names.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    vocabulary: int | None = None
    owner: Tensor | None = None
    owners: tuple[str, ...] = ()
    domains: Groups = field(default_factory=dict)
    superclasses: Groups = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)

    def inputs(self, index: Tensor) -> Tensor:
        """The samples of these indices as a model takes them: float32, or tokens as they are stored."""
        x = self.x[index]
        if self.scale is None:
            return x
        mean, deviation = (torch.tensor(part).view(-1, 1, 1) for part in self.scale)
        return x.float().div_(255).sub_(mean).div_(deviation)


def _require(name: str, root: Path, files: Sequence[str], get: str) -> None:
    """Raise FileNotFoundError, with `get` on how to come by them, unless all `files` are below `root`."""
    missing = [file for file in files if not (root / file).exists()]
    if missing:
        raise _missing(name, root / missing[0], root, get)


def _missing(name: str, path: Path, root: Path, get: str, form: str = "") -> FileNotFoundError:
    return FileNotFoundError(
        f"dataset={name!r}: {path}{form} is missing. {get} The folder {str(root)!r} can be another:"
        f" --data-dir, root= or the environment variable {ROOT}."
    )


def _torchvision(name: str, read: Callable[[Any], list]) -> list:
    """What `read` makes of torchvision.datasets, which is only imported here."""
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError, OSError) as error:
        raise ValueError(
            f"dataset={name!r} is read by torchvision, which cannot be imported here ({error}); install the build that"
            f" goes with PyTorch {torch.__version__} from where that came from: pip install torchvision"
        ) from error
    try:
        return read(datasets)
    except Exception as error:
        raise ValueError(f"dataset={name!r}: torchvision cannot read its files: {error}") from error


def _by_torchvision(name: str, root: Path) -> str:
    kind = {
        "mnist": "MNIST",
        "fashion-mnist": "FashionMNIST",
        "svhn": "SVHN",
        "cifar10": "CIFAR10",
        "cifar100": "CIFAR100",
    }[name]
    folder = root / "svhn" if name == "svhn" else root
    first, second = ("split='train'", "split='test'") if name == "svhn" else ("train=True", "train=False")
    return (
        f"torchvision fetches it: torchvision.datasets.{kind}({str(folder)!r}, {first}, download=True), and again with"
        f" {second}."
    )


def _digits(root: Path) -> Dataset:
    """The 1,797 handwritten digits of scikit-learn: 8×8, one channel, scaled to 0 … 1, then to mean 0, deviation 1."""
    table = _digits_table()
    x = torch.from_numpy(table[:, :-1]).float().view(-1, 1, 8, 8) / 16
    x = (x - 0.3053) / 0.3760
    y = torch.from_numpy(table[:, -1]).long()
    return Dataset("digits", x, y, tuple(map(str, range(10))), domains=PAIRS)


def _digits_table() -> np.ndarray:
    """64 pixels and the digit in each row. The file is read as it is: importing scikit-learn takes two seconds."""
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    path = Path(folders[0], "datasets", "data", "digits.csv.gz") if folders else None
    if path is not None and path.is_file():
        with gzip.open(path, "rt") as lines:
            return np.loadtxt(lines, delimiter=",")
    from sklearn.datasets import load_digits

    raw = load_digits()
    return np.column_stack([raw.data, raw.target])


PAIRS = {f"{first} and {first + 1}": (first, first + 1) for first in range(0, 10, 2)}
"""Five domains of two classes."""


DEBIAN = Path("/usr/share/datasets")
"""Where Debian's packages of data sets put them."""


def _idx(path: Path, dimensions: int) -> Tensor:
    """A file of unsigned bytes in the idx format (MNIST's), gzipped or not: uint8 of so many dimensions.

    Raises ValueError for a file that is none, or is shorter or longer than its header says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {error}") from error
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if len(content) < header or content[:4] != magic:
        raise ValueError(
            f"{path} begins with {content[:4].hex()}, must be {magic.hex()}: bytes, {dimensions} dimensions"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise ValueError(f"{path} has {len(content) - header} bytes of data, must be {math.prod(shape)} ({shape})")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())


def _by_idx(name: str, root: Path, folders: Sequence[str], get: str) -> tuple[Tensor, Tensor]:
    """(x uint8 [n, 1, h, w], y) of the four idx files of MNIST and what is made like it, training set first, in one
    of these folders below `root`."""
    files = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

    def found(folder: Path) -> dict[str, Path]:
        both = {file: [path for path in (folder / file, folder / f"{file}.gz") if path.is_file()] for file in files}
        return {file: there[0] for file, there in both.items() if there}

    folder = max((root / each for each in folders), key=lambda each: len(found(each)))
    there = found(folder)
    if missing := [file for file in files if file not in there]:
        raise _missing(name, folder / missing[0], root, get, ", with or without .gz,")
    paths = list(there.values())
    try:
        parts = [_idx(path, 3 if "images" in path.name else 1) for path in paths]
    except ValueError as error:
        raise ValueError(f"dataset={name!r}: {error}") from error
    x, y = parts[::2], parts[1::2]
    for images, labels, path in zip(x, y, paths[::2], strict=True):
        if len(images) != len(labels):
            raise ValueError(f"dataset={name!r}: {path} has {len(images)} images, its labels are {len(labels)}")
        if len(labels) and int(labels.max()) > 9:
            raise ValueError(f"dataset={name!r}: label {int(labels.max())} beside {path}, must be 0 … 9")
    if x[0].shape[1:] != x[1].shape[1:]:
        raise ValueError(f"dataset={name!r}: images of {list(x[0].shape[1:])} and {list(x[1].shape[1:])} pixels")
    return torch.cat(x).unsqueeze(1), torch.cat(y).long()


def _mnist(root: Path) -> Dataset:
    """MNIST (LeCun et al., 1998): 70,000 handwritten digits, 28×28, one channel."""
    x, y = _by_idx("mnist", root, ["MNIST/raw", "mnist"], _by_torchvision("mnist", root))
    return Dataset("mnist", x, y, tuple("0123456789"), scale=((0.1307,), (0.3081,)), domains=PAIRS)


CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def _fashion_mnist(root: Path) -> Dataset:
    """Fashion-MNIST (Xiao et al., 2017): 70,000 photographs of clothes, 28×28, one channel."""
    folders = ["FashionMNIST/raw", "fashion-mnist", str(DEBIAN / "fashion-mnist")]
    get = f"On Debian, apt-get install dataset-fashion-mnist; or {_by_torchvision('fashion-mnist', root)}"
    x, y = _by_idx("fashion-mnist", root, folders, get)
    return Dataset("fashion-mnist", x, y, CLOTHES, scale=((0.2860,), (0.3530,)), domains=PAIRS)


def _svhn(root: Path) -> Dataset:
    """SVHN (Netzer et al., 2011), train and test: 99,289 house-number digits, 32×32, three channels."""
    files = [f"svhn/{split}_32x32.mat" for split in ("train", "test")]
    get = f"From ufldl.stanford.edu/housenumbers, or {_by_torchvision('svhn', root)}"
    _require("svhn", root, files, get)
    parts = _torchvision("svhn", lambda datasets: [datasets.SVHN(root / "svhn", split) for split in ("train", "test")])
    x = torch.cat([torch.from_numpy(np.ascontiguousarray(part.data)) for part in parts])
    y = torch.cat([torch.from_numpy(part.labels) for part in parts]).long()
    scale = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
    return Dataset("svhn", x, y, tuple("0123456789"), scale=scale, domains=PAIRS)


def _cifar(name: str, root: Path) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    if name == "cifar10":
        folder, files = "cifar-10-batches-py", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    else:
        folder, files = "cifar-100-python", ["train", "test", "meta"]
    get = f"The Python version from cs.toronto.edu/~kriz/cifar.html, or {_by_torchvision(name, root)}"
    _require(name, root, [f"{folder}/{file}" for file in files], get)
    parts = _torchvision(name, lambda datasets: [getattr(datasets, name.upper())(root, train=t) for t in (True, False)])
    x = torch.cat([torch.from_numpy(part.data) for part in parts]).permute(0, 3, 1, 2).contiguous()
    return x, torch.tensor([label for part in parts for label in part.targets]), tuple(parts[0].classes)


def _cifar10(root: Path) -> Dataset:
    """CIFAR-10 (Krizhevsky, 2009): 60,000 photographs, 32×32, three channels, 10 classes."""
    scale = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return Dataset("cifar10", *_cifar("cifar10", root), scale=scale)


CIFAR100_SUPERCLASSES = {
    "aquatic mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit and vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household electrical devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large man-made outdoor things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large natural outdoor scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large omnivores and herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium-sized mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles 1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles 2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
"""The 20 superclasses of CIFAR-100, in the order of its coarse labels, which is that of SimFed's Table 2."""

CIFAR100_DOMAINS = {
    "Household Objects": ("household furniture", "household electrical devices"),
    "Fruits & Foods": ("fruit and vegetables", "food containers"),
    "Trees & Flowers": ("flowers", "trees"),
    "Transport": ("vehicles 1", "vehicles 2"),
    "Animals": ("medium-sized mammals", "large carnivores"),
}
"""The domains of Factorized-FL (arXiv version, Table 4): pairs of superclasses."""


def _cifar100_groups() -> tuple[Groups, Groups]:
    """(domains, superclasses) as labels, each in ascending order.

    Labels are the places of the class names in alphabetical order. Table 4 lists the names by superclass beside labels
    in ascending order, so that a row's name and label need not belong together ("Couch 22" is couch, 25, and clock,
    22); its sets are right. The labels are taken to count, which a program sorts.
    """
    label = {name: index for index, name in enumerate(sorted(sum(CIFAR100_SUPERCLASSES.values(), ())))}
    superclasses = {name: tuple(sorted(label[n] for n in members)) for name, members in CIFAR100_SUPERCLASSES.items()}
    domains = {
        name: tuple(sorted(superclasses[pair[0]] + superclasses[pair[1]])) for name, pair in CIFAR100_DOMAINS.items()
    }
    return domains, superclasses


def _cifar100(root: Path) -> Dataset:
    """CIFAR-100 (Krizhevsky, 2009): 60,000 photographs, 32×32, three channels, 100 classes in 20 superclasses."""
    domains, superclasses = _cifar100_groups()
    scale = ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))
    x, y, classes = _cifar("cifar100", root)
    return Dataset("cifar100", x, y, classes, scale=scale, domains=domains, superclasses=superclasses)


def _text(name: str, path: Path) -> str:
    """The text of a file of a data set. Raises ValueError, with the path, where it is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"dataset={name!r}: {path} is no text in UTF-8: {error}") from error


def _tiny_imagenet(root: Path) -> Dataset:
    """Tiny-ImageNet, train and validation: 110,000 photographs, 64×64, three channels, 200 classes."""
    get = "Unpack tiny-imagenet-200.zip of Stanford's course CS231n (cs231n.stanford.edu/tiny-imagenet-200.zip) there."
    base = "tiny-imagenet-200"
    files = ["wnids.txt", "words.txt", "train", "val/val_annotations.txt"]
    _require("tiny-imagenet", root, [f"{base}/{file}" for file in files], get)
    folder = root / base
    ids = sorted(_text("tiny-imagenet", folder / "wnids.txt").split())
    if not ids:
        raise ValueError(f"dataset='tiny-imagenet': {folder / 'wnids.txt'} names no class")
    words = _text("tiny-imagenet", folder / "words.txt").splitlines()
    named = dict(line.split("\t", 1) for line in words if "\t" in line)
    label = {wnid: index for index, wnid in enumerate(ids)}
    paths = []
    for wnid in ids:
        found = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not found:
            raise ValueError(f"dataset='tiny-imagenet': {folder / 'train' / wnid / 'images'} holds no file *.JPEG")
        paths += [(path, label[wnid]) for path in found]
    for line in sorted(_text("tiny-imagenet", folder / "val" / "val_annotations.txt").splitlines()):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in label:
            raise ValueError(
                f"dataset='tiny-imagenet': val_annotations.txt has {line!r}, its class is not in wnids.txt"
            )
        paths.append((folder / "val" / "images" / name, label[wnid]))

    def read(datasets) -> list:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda item: np.asarray(datasets.folder.default_loader(item[0])), paths))

    images = _torchvision("tiny-imagenet", read)
    for (path, _), image in zip(paths, images, strict=True):
        if image.shape != (64, 64, 3):
            raise ValueError(f"dataset='tiny-imagenet': {path} is {image.shape[:2]}, must be 64×64")
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    classes = tuple(named.get(wnid, wnid).split(",")[0] for wnid in ids)
    scale = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
    return Dataset("tiny-imagenet", x, torch.tensor([label for _, label in paths]), classes, scale=scale)


def _leaf(name: str, root: Path, call: str, convert: Callable[[list, list], tuple[np.ndarray, np.ndarray]]):
    """(x, y, owner, owners) from LEAF's JSON files, those of its training and test set together.

    convert(x, y of one user) → arrays. Owners are in alphabetical order, samples in that of the files.
    """
    get = (
        f"Make it with LEAF (github.com/TalwalkarLab/leaf): in its data/{name}, ./preprocess.sh {call}, then copy the"
        f" JSON files of data/train and data/test to {root / name / 'train'} and {root / name / 'test'}."
    )
    _require(name, root, [f"{name}/train", f"{name}/test"], get)
    paths = [path for part in ("train", "test") for path in sorted((root / name / part).glob("*.json"))]
    if not paths:
        raise FileNotFoundError(f"dataset={name!r}: no .json file in {root / name / 'train'}. {get}")
    parts = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            for user in content["users"]:
                samples = content["user_data"][user]
                n, labels = len(samples["x"]), len(samples["y"])
                if n != labels:
                    raise ValueError(f"user {user!r} has {n} samples x but {labels} labels y")
                if n:
                    parts.append((user, *convert(samples["x"], samples["y"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(f"dataset={name!r}: {path} is not a file of LEAF: {error!r}") from error
    if not parts:
        raise ValueError(f"dataset={name!r}: the files in {root / name} hold no sample")
    owners = tuple(sorted({user for user, _, _ in parts}))
    number = {user: index for index, user in enumerate(owners)}
    owner = np.repeat([number[user] for user, _, _ in parts], [len(y) for _, _, y in parts])
    x, y = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    return torch.from_numpy(x), torch.from_numpy(y).long(), torch.from_numpy(owner).long(), owners


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _femnist(root: Path) -> Dataset:
    """FEMNIST (LEAF; Caldas et al., 2018): digits and letters, 28×28, one channel, 62 classes, by writer."""

    def convert(x: list, y: list) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = np.array(x, np.float32), np.array(y)
        if pixels.ndim != 2 or pixels.shape[1] != 784:
            raise ValueError(f"x of shape {list(pixels.shape)}, must be rows of 784 pixels")
        # NaN is not in the range either.
        if not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError(f"pixels {pixels.min()} … {pixels.max()}, must be 0 … 1")
        if labels.ndim != 1 or labels.dtype.kind != "i":
            raise ValueError(f"labels y of shape {list(labels.shape)}, type {labels.dtype}, must be a row of integers")
        if not 0 <= labels.min() <= labels.max() < 62:
            raise ValueError(f"labels {labels.min()} … {labels.max()}, must be 0 … 61")
        return np.rint(pixels.reshape(-1, 1, 28, 28) * 255).astype(np.uint8), labels.astype(np.int64)

    x, y, owner, owners = _leaf("femnist", root, "-s niid --sf 0.3 -k 0 -t sample", convert)
    classes = tuple("0123456789" + LETTERS + LETTERS.lower())
    return Dataset("femnist", x, y, classes, scale=((0.9637,), (0.1597,)), owner=owner, owners=owners)


CHARACTERS = "\n !\"&'(),-.0123456789:;>?" + LETTERS + "[]" + LETTERS.lower() + "}"
"""The 80 characters of LEAF's Shakespeare. Any other one counts as the last, as in LEAF."""


def _shakespeare(root: Path) -> Dataset:
    """Shakespeare (LEAF): which of 80 characters follows 80 given ones, by speaking role."""
    code = np.full(0x110000, len(CHARACTERS) - 1, np.uint8)
    code[[ord(character) for character in CHARACTERS]] = range(len(CHARACTERS))

    def codes(texts: list[str], length: int) -> np.ndarray:
        if wrong := next((text for text in texts if len(text) != length), None):
            raise ValueError(f"text {wrong!r} has {len(wrong)} characters, must have {length}")
        return code[np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)].reshape(-1, length)

    x, y, owner, owners = _leaf(
        "shakespeare", root, "-s niid --sf 1.0 -k 0 -t sample", lambda x, y: (codes(x, 80), codes(y, 1)[:, 0])
    )
    return Dataset("shakespeare", x, y, tuple(CHARACTERS), vocabulary=len(CHARACTERS), owner=owner, owners=owners)


def _mnist_cifar10(root: Path) -> Dataset:
    """MNIST and CIFAR-10 as one pool of 20 classes, as three channels of 32×32: MNIST padded and repeated."""
    digits, pictures = _mnist(root), _cifar10(root)
    x = torch.nn.functional.pad(digits.x, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    names = tuple(f"digit {name}" for name in digits.classes) + pictures.classes
    groups = {"mnist": tuple(range(10)), "cifar10": tuple(range(10, 20))}
    y = torch.cat([digits.y, pictures.y + 10])
    return Dataset(
        "mnist-cifar10", torch.cat([x, pictures.x]), y, names, scale=((0.5,) * 3, (0.25,) * 3), domains=groups
    )


WORDS, LENGTH = 30_000, 64
"""AG_NEWS: the most frequent words that are told apart, and how many words of an article are read."""
HEADINGS = [[label, "title", "description"] for label in ("class index", "class", "label")]
"""Of its columns, in lower case, in copies that have them."""


def _ag_news(root: Path) -> Dataset:
    """AG_NEWS (Zhang et al., 2015), train and test: 127,600 news articles, 4 classes, as numbers of words.

    Title and description in lower case, cut to 64 words. 0 fills short ones up, 1 is any word that is not among the
    30,000 most frequent of the training file, or occurs there once only.
    """
    get = "Get train.csv and test.csv of AG's News Topic Classification Dataset by Xiang Zhang (ag_news_csv) into it."
    _require("ag-news", root, ["ag_news/train.csv", "ag_news/test.csv"], get)
    texts, labels = {}, {}
    for part in ("train", "test"):
        path = root / "ag_news" / f"{part}.csv"
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.reader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"dataset='ag-news': {path} is no table of text in UTF-8: {error}") from error
        rows = rows[1:] if rows and [cell.strip().lower() for cell in rows[0]] in HEADINGS else rows
        if not rows:
            raise ValueError(f"dataset='ag-news': {path} has no rows")
        for number, row in enumerate(rows, 1):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise ValueError(f"dataset='ag-news': {path}, row {number} is no (1 … 4, title, description): {row}")
        texts[part] = [re.findall(r"[a-z0-9]+(?:'[a-z]+)?", f"{row[1]} {row[2]}".lower()) for row in rows]
        labels[part] = [int(row[0]) - 1 for row in rows]
    counts = Counter(word for text in texts["train"] for word in text)
    ranked = sorted((word for word in counts if counts[word] > 1), key=lambda word: (-counts[word], word))[:WORDS]
    place = {word: index for index, word in enumerate(ranked, 2)}
    x = torch.zeros(sum(map(len, texts.values())), LENGTH, dtype=torch.int32)
    for row, text in zip(x.numpy(), texts["train"] + texts["test"], strict=True):
        read = [place.get(word, 1) for word in text[:LENGTH]] or [1]
        row[: len(read)] = read
    y = torch.tensor(labels["train"] + labels["test"])
    return Dataset("ag-news", x, y, ("World", "Sports", "Business", "Sci/Tech"), vocabulary=len(place) + 2)


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "svhn": _svhn,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "mnist-cifar10": _mnist_cifar10,
    "tiny-imagenet": _tiny_imagenet,
    "femnist": _femnist,
    "shakespeare": _shakespeare,
    "ag-news": _ag_news,
}


def load(name: str, root: str | Path | None = None) -> Dataset:
    """The data set called `name`, read from the folder `root`.

    Without `root` that is what the environment variable FASTFACT_DATA says, or else `data`; digits needs none. The last
    data set read is kept. Raises ValueError for an unknown name, unreadable files or torchvision missing where it is
    needed, and FileNotFoundError, saying what to download and where to put it, for a data set that is not there.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset={name!r}, must be one of {', '.join(DATASETS)}")
    return _load(name, Path(root if root is not None else os.environ.get(ROOT, "data")).absolute())


@lru_cache(maxsize=1)
def _load(name: str, root: Path) -> Dataset:
    return DATASETS[name](root)
