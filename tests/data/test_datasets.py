"""The loaders, on small files in the format of the real ones."""

import csv
import gzip
import hashlib
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfact import data, models
from fastfact.data import datasets
from fastfact.federation import Client, Federation

RNG = np.random.default_rng(0)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_idx(path, array, zipped=False):
    """The IDX format of MNIST: two zeros, type 8 (unsigned byte), the number of dimensions, the sizes, the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if zipped else content)


def test_idx_files_that_are_missing_are_named_in_the_folder_that_has_the_others(tmp_path):
    write_clothes(tmp_path / "mnist", zipped=True)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"/mnist/t10k-labels-idx1-ubyte, with or without .gz, is missing"):
        data.load("mnist", tmp_path)
    # As some archives unpack them: each in a folder of its own name.
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "unpacked" / "mnist" / f"{part}-ubyte").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte, with or without .gz, is missing"):
        data.load("mnist", tmp_path / "unpacked")


def test_mnist(tmp_path):
    images = {"train": RNG.integers(0, 256, (7, 28, 28)), "t10k": RNG.integers(0, 256, (3, 28, 28))}
    labels = {part: RNG.integers(0, 10, len(x)) for part, x in images.items()}
    for part in images:
        write_idx(tmp_path / "MNIST/raw" / f"{part}-images-idx3-ubyte", images[part])
        write_idx(tmp_path / "MNIST/raw" / f"{part}-labels-idx1-ubyte", labels[part])
    mnist = data.load("mnist", tmp_path)
    assert mnist.x.dtype == torch.uint8 and mnist.y.dtype == torch.int64 and len(mnist) == 10
    expected = torch.from_numpy(np.concatenate([images["train"], images["t10k"]]))
    assert torch.equal(mnist.x[:, 0].long(), expected) and mnist.y.tolist() == [*labels["train"], *labels["t10k"]]
    torch.testing.assert_close(mnist.inputs(torch.tensor([2]))[0, 0], (expected[2].float() / 255 - 0.1307) / 0.3081)
    assert len(mnist.classes) == 10 and list(mnist.domains.values())[1] == (2, 3)


def write_clothes(folder, n=4, zipped=False):
    end = ".gz" if zipped else ""
    for part, count in (("train", 2 * n), ("t10k", n)):
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", RNG.integers(0, 256, (count, 28, 28)), zipped)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", np.arange(count) % 10, zipped)


@pytest.mark.parametrize("folder, zipped", [("fashion-mnist", True), ("FashionMNIST/raw", False)])
def test_fashion_mnist(tmp_path, monkeypatch, folder, zipped):
    monkeypatch.setattr(datasets, "DEBIAN", tmp_path / "usr")
    write_clothes(tmp_path / folder, zipped=zipped)
    clothes = data.load("fashion-mnist", tmp_path)
    assert clothes.x.shape == (12, 1, 28, 28) and clothes.x.dtype == torch.uint8
    assert clothes.y.tolist() == [*range(8), *range(4)] and clothes.classes[9] == "Ankle boot"


def test_fashion_mnist_is_found_where_debian_puts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "DEBIAN", tmp_path / "usr")
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        data.load("fashion-mnist", tmp_path / "empty")
    write_clothes(tmp_path / "usr" / "fashion-mnist", zipped=True)
    assert len(data.load("fashion-mnist", tmp_path / "empty")) == 12


@pytest.mark.parametrize(
    "damage, told",
    [
        (lambda content: content[:-1], "bytes of data, must be 6272"),
        (lambda content: content + b"0", "bytes of data, must be 6272"),
        (lambda content: b"\0\0\x0d" + content[3:], "must be 00000803"),
        (lambda content: b"", "must be 00000803"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, damage, told):
    write_clothes(tmp_path / "fashion-mnist")
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte.*{told}"):
        data.load("fashion-mnist", tmp_path)


def test_damaged_gzip_more_labels_than_images_and_unknown_labels_are_errors(tmp_path):
    folder = tmp_path / "fashion-mnist"
    write_clothes(folder, zipped=True)
    whole = (folder / "train-images-idx3-ubyte.gz").read_bytes()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz"):
        data.load("fashion-mnist", tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(whole)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.arange(3), zipped=True)
    with pytest.raises(ValueError, match="8 images, its labels are 3"):
        data.load("fashion-mnist", tmp_path)
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.full(8, 10), zipped=True)
    with pytest.raises(ValueError, match="label 10 "):
        data.load("fashion-mnist", tmp_path)


@pytest.mark.skipif(not (datasets.DEBIAN / "fashion-mnist").is_dir(), reason="apt-get install dataset-fashion-mnist")
def test_fashion_mnist_itself(tmp_path):
    clothes = data.load("fashion-mnist", tmp_path)
    assert clothes.x.shape == (70_000, 1, 28, 28) and clothes.y.bincount().tolist() == [7000] * 10
    x = clothes.x[:60_000].double() / 255
    assert abs(float(x.mean()) - clothes.scale[0][0]) < 1e-4 and abs(float(x.std()) - clothes.scale[1][0]) < 1e-4


def test_svhn(tmp_path, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    (tmp_path / "svhn").mkdir()
    pictures, digits, listed = [], [], {}
    for split, n in (("train", 6), ("test", 4)):
        x, y = RNG.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), RNG.integers(1, 11, (n, 1), dtype=np.uint8)
        y[0] = 10
        path = tmp_path / "svhn" / f"{split}_32x32.mat"
        savemat(path, {"X": x, "y": y})
        listed[split] = [SVHN.split_list[split][0], path.name, md5(path)]
        pictures.append(x)
        digits += (y[:, 0] % 10).tolist()
    monkeypatch.setattr(SVHN, "split_list", listed)
    svhn = data.load("svhn", tmp_path)
    assert svhn.x.shape == (10, 3, 32, 32) and svhn.y.tolist() == digits
    assert torch.equal(svhn.x[7, :, 4, 9], torch.from_numpy(pictures[1][4, 9, :, 1]))


def write_cifar(tmp_path, monkeypatch, name, per_class):
    """Batches pickled as the Python version has them: rows of 3,072 bytes, channel after channel, latin-1 keys."""
    from torchvision import datasets as theirs

    kind, count = getattr(theirs, name.upper()), {"cifar10": 10, "cifar100": 100}[name]
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    fine = sorted(sum(datasets.CIFAR100_SUPERCLASSES.values(), ()))
    classes = fine if count == 100 else [f"class {i}" for i in range(10)]
    key = "labels" if count == 10 else "fine_labels"
    rows, labels = [], []

    def put(file, content):
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        return md5(folder / file)

    lists = {}
    for attribute in ("train_list", "test_list"):
        lists[attribute] = []
        for file, _ in getattr(kind, attribute):
            y = RNG.permutation(np.repeat(np.arange(count), per_class)).tolist()
            x = RNG.integers(0, 256, (len(y), 3072), dtype=np.uint8)
            lists[attribute].append([file, put(file, {"data": x, key: y, "filenames": []})])
            rows.append(x)
            labels += y
        monkeypatch.setattr(kind, attribute, lists[attribute])
    meta = {"filename": kind.meta["filename"], "key": kind.meta["key"]}
    meta["md5"] = put(meta["filename"], {meta["key"]: classes})
    monkeypatch.setattr(kind, "meta", meta)
    return np.concatenate(rows), labels, classes


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, monkeypatch, name):
    rows, labels, classes = write_cifar(tmp_path, monkeypatch, name, per_class=2)
    cifar = data.load(name, tmp_path)
    assert torch.equal(cifar.x.flatten(1), torch.from_numpy(rows)) and cifar.y.tolist() == labels
    assert cifar.classes == tuple(classes) and bool(cifar.superclasses) == (name == "cifar100")
    for members, labels in zip(datasets.CIFAR100_SUPERCLASSES.values(), cifar.superclasses.values(), strict=False):
        assert {cifar.classes[label] for label in labels} == set(members)
    x, mean = cifar.inputs(torch.arange(5)), cifar.x[:5].float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(x.mean((0, 2, 3)), (mean - torch.tensor(cifar.scale[0])) / torch.tensor(cifar.scale[1]))


def test_domains_of_cifar100_from_files_to_a_round(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch, "cifar100", per_class=8)
    made = data.make_clients("cifar100", "domains", 20, seed=0, root=tmp_path)
    assert made[0].train[0].dtype == torch.float32 and made[0].num_classes == 10
    fed = Federation(
        lambda: models.build("resnet8", (3, 32, 32), 10, 0.125),
        [Client(c.train, c.test) for c in made[::10]],
        epochs=1,
        augment=data.Augment(crop=True, flip=True, jitter=True, scale=data.load("cifar100", tmp_path).scale),
    )
    assert len(fed.fit(rounds=1)) == 2


def test_a_broken_cifar_is_named(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch, "cifar10", per_class=1)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="dataset='cifar10': torchvision cannot read its files"):
        data.load("cifar10", tmp_path)


def write_tiny_imagenet(root, size=64):
    from PIL import Image

    base, colours = root / "tiny-imagenet-200", {}

    def picture(path, colour):
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = "L" if isinstance(colour, int) else "RGB"
        Image.new(mode, (size, size), colour).save(path, "JPEG", quality=95)
        colours[path.name] = (colour,) * 3 if isinstance(colour, int) else colour

    for wnid, colour in (("n02", (200, 30, 40)), ("n01", 90)):
        for i in range(2):
            picture(base / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", colour)
    picture(base / "val" / "images" / "val_0.JPEG", (10, 20, 250))
    (base / "wnids.txt").write_text("n02\nn01\n")
    (base / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\ttench\nn03\tother\n")
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t32\t44\t62\n")
    return base


def test_tiny_imagenet(tmp_path):
    base = write_tiny_imagenet(tmp_path)
    tiny = data.load("tiny-imagenet", tmp_path)
    assert tiny.x.shape == (5, 3, 64, 64) and tiny.x.dtype == torch.uint8
    assert tiny.classes == ("goldfish", "tench") and tiny.y.tolist() == [0, 0, 1, 1, 1]
    expected = torch.tensor([[90, 90, 90]] * 2 + [[200, 30, 40]] * 2 + [[10, 20, 250]])
    assert int((tiny.x[:, :, 32, 32].long() - expected).abs().max()) <= 3
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t32\t44\t62\n")
    datasets._load.cache_clear()
    with pytest.raises(ValueError, match=r"'val_0.JPEG\\tn09.*its class is not in wnids.txt"):
        data.load("tiny-imagenet", tmp_path)


def test_tiny_imagenet_of_another_size_is_refused(tmp_path):
    write_tiny_imagenet(tmp_path, size=48)
    with pytest.raises(ValueError, match=r"is \(48, 48\), must be 64×64"):
        data.load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda base: (base / "wnids.txt").write_text("n02\nn01\nn03\n"), "train/n03/images holds no file"),
        (lambda base: (base / "wnids.txt").write_text("n02\nn00\n"), "train/n00/images holds no file"),
        (lambda base: [f.rename(f.with_suffix(".jpg")) for f in base.glob("train/n01/images/*")], "n01/images holds"),
        (lambda base: (base / "wnids.txt").write_text("\n"), "wnids.txt names no class"),
        (lambda base: (base / "words.txt").write_bytes("n01\tCafé".encode("latin-1")), "words.txt is no text"),
    ],
)
def test_tiny_imagenet_passes_over_nothing(tmp_path, damage, message):
    damage(write_tiny_imagenet(tmp_path))
    with pytest.raises(ValueError, match=rf"dataset='tiny-imagenet': .*{message}"):
        data.load("tiny-imagenet", tmp_path)


def write_leaf(folder, parts):
    """Files of LEAF: parts = {"train/name": {user: (x, y)}}."""
    for name, users in parts.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        path.write_text(json.dumps(content))


def test_femnist(tmp_path):
    def drawn(n):
        return (RNG.integers(0, 256, (n, 784)) / 255).round(6).tolist(), RNG.integers(0, 62, n).tolist()

    a, b, c = drawn(12), drawn(15), drawn(3)
    a[1][0] = 61
    write_leaf(tmp_path / "femnist", {"train/one": {"f07": a}, "train/two": {"f01": b}, "test/one": {"f07": c}})
    femnist = data.load("femnist", tmp_path)
    assert femnist.x.shape == (30, 1, 28, 28) and femnist.owners == ("f01", "f07") and len(femnist.classes) == 62
    assert femnist.owner.tolist() == [1] * 12 + [0] * 15 + [1] * 3 and femnist.y.tolist() == a[1] + b[1] + c[1]
    pixels = femnist.x.flatten(1).double() / 255
    torch.testing.assert_close(pixels, torch.tensor(a[0] + b[0] + c[0]).double(), rtol=0, atol=1e-6)
    assert (femnist.classes[9], femnist.classes[10], femnist.classes[36]) == ("9", "A", "a")
    made = data.make_clients("femnist", "natural", 2, seed=0, root=tmp_path)
    assert [len(m.train[1]) + len(m.test[1]) for m in made] == [15, 15] and [len(m.test[1]) for m in made] == [3, 3]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0.0] * 783 + [1.01]], [1], "pixels 0.0 … 1.0[0-9]*, must be 0 … 1"),
        ([[-0.01] + [0.0] * 783], [1], "pixels -0.0[0-9]* … 0.0, must be 0 … 1"),
        ([[float("nan")] * 784], [1], "pixels nan … nan"),
        ([[None] * 784], [1], "pixels nan … nan"),
        ([[1e300] * 784], [1], "pixels inf … inf"),
        ([[0.0] * 1568], [1], r"x of shape \[1, 1568\], must be rows of 784"),
        ([[0.0] * 1568, [0.0] * 1568], [1, 2], r"x of shape \[2, 1568\], must be rows of 784"),
        ([0.0] * 784, [0] * 784, r"x of shape \[784\], must be rows of 784"),
        ([[0.0] * 784], [1.5], "type float64, must be a row of integers"),
        ([[0.0] * 784], [True], "type bool, must be a row of integers"),
        ([[0.0] * 784], [[1]], r"labels y of shape \[1, 1\]"),
        ([[0.0] * 784], [10**30], "type object, must be a row of integers"),
        ([[0.0] * 784], [1e300], "type float64, must be a row of integers"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_femnist_of_other_numbers_is_refused(tmp_path, x, y, message):
    write_leaf(tmp_path / "femnist", {"train/bad": {"f00": (x, y)}, "test/none": {}})
    with pytest.raises(ValueError, match=rf"dataset='femnist': .*bad.json is not a file of LEAF: .*{message}"):
        data.load("femnist", tmp_path)


def test_leaf_without_samples_or_nested_without_end_is_refused(tmp_path):
    write_leaf(tmp_path / "femnist", {"train/one": {"f00": ([], [])}, "test/one": {}})
    with pytest.raises(ValueError, match=r"dataset='femnist': the files in .*femnist hold no sample"):
        data.load("femnist", tmp_path)
    (tmp_path / "femnist" / "train" / "one.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"one.json is not a file of LEAF: RecursionError"):
        data.load("femnist", tmp_path)


def test_shakespeare_from_files_to_rounds(tmp_path):
    play = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer; the slings and arrows"
    play = (play + "\n") * 3

    def lines(start, n):
        return [play[i : i + 80] for i in range(start, start + n)], [play[i + 80] for i in range(start, start + n)]

    odd = lines(40, 11)
    odd[0][0], odd[1][1] = "é" + odd[0][0][1:], "ß"
    parts = {"train/all": {"HAMLET": lines(0, 20), "GHOST": odd}, "test/all": {"HAMLET": lines(60, 8)}}
    write_leaf(tmp_path / "shakespeare", parts)
    shakespeare = data.load("shakespeare", tmp_path)
    assert shakespeare.x.shape == (39, 80) and shakespeare.x.dtype == torch.uint8 and shakespeare.vocabulary == 80
    assert len(datasets.CHARACTERS) == len(set(datasets.CHARACTERS)) == 80
    text = "".join(datasets.CHARACTERS[i] for i in shakespeare.x[3].tolist())
    assert text == play[3:83] and datasets.CHARACTERS[int(shakespeare.y[3])] == play[83]
    assert int(shakespeare.x[20, 0]) == int(shakespeare.y[21]) == 79
    assert shakespeare.owners == ("GHOST", "HAMLET")
    made = data.make_clients("shakespeare", "natural", 2, seed=0, root=tmp_path)
    assert [len(m.train[1]) + len(m.test[1]) for m in made] == [11, 28]
    check_rounds("lstm", made)


def check_rounds(name, made):
    """A model on tokens through a federation, one client at a time and together: the same up to rounding."""
    vocabulary, shape = made[0].vocabulary, tuple(made[0].train[0].shape[1:])

    def rounds(cohort, method="factorized-fl-alpha"):
        fed = Federation(
            lambda: models.build(name, shape, made[0].num_classes, 0.1, vocabulary),
            [Client(c.train, c.test) for c in made],
            method,
            epochs=1,
            batch_size=8,
            lr=0.05,
            cohort=cohort,
        )
        return fed.fit(rounds=2), fed

    alone, fed = rounds(1)
    assert not fed.clients[0].train[0].is_floating_point()
    together, _ = rounds(len(made))
    for one, other in zip(alone, together, strict=True):
        assert one["left_out"] is None and one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert np.isfinite(one["loss"])


def write_csv(path, rows):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def test_ag_news_from_files_to_rounds(tmp_path):
    train = [(1 + i % 4, "Wall St. Bears", f"Short-sellers aren't \\green, word{i} again") for i in range(24)]
    train[5] = (2, "", "")
    write_csv(tmp_path / "ag_news/train.csv", [("Class Index", "Title", "Description"), *train])
    write_csv(tmp_path / "ag_news/test.csv", [(4, "bears unseen", "wall " * 100)])
    news = data.load("ag-news", tmp_path)
    assert news.x.shape == (25, 64) and news.x.dtype == torch.int32 and not news.x.is_floating_point()
    assert news.y.tolist() == [row[0] - 1 for row in train] + [3]
    # Words found 23 times each, in alphabetical order; the rest occur once.
    words = ["again", "aren't", "bears", "green", "sellers", "short", "st", "wall"]
    code = {word: index for index, word in enumerate(words, 2)}
    assert news.vocabulary == 10
    expected = [code[w] for w in ("wall", "st", "bears", "short", "sellers", "aren't", "green")] + [1, code["again"]]
    assert news.x[0].tolist() == expected + [0] * 55
    assert news.x[5].tolist() == [1] + [0] * 63
    assert news.x[24].tolist() == [code["bears"], 1] + [code["wall"]] * 62
    made = data.make_clients("ag-news", "client-dirichlet", 2, seed=0, root=tmp_path)
    check_rounds("transformer", made)
    check_rounds("lstm-words", made)


def test_ag_news_keeps_the_most_frequent_words(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "WORDS", 2)
    write_csv(tmp_path / "ag_news/train.csv", [(1, "a b b c", "c c a d d")])
    write_csv(tmp_path / "ag_news/test.csv", [(1, "", "")])
    assert data.load("ag-news", tmp_path).x[0, :9].tolist() == [3, 1, 1, 2, 2, 2, 3, 1, 1]


@pytest.mark.parametrize(
    ("row", "message"), [((5, "a", "b"), "row 1"), ((1, "only two"), "row 1 is no"), (("", "", ""), "row 1")]
)
def test_ag_news_names_a_bad_row(tmp_path, row, message):
    write_csv(tmp_path / "ag_news/train.csv", [("Class Index", "Title", "Description"), row])
    write_csv(tmp_path / "ag_news/test.csv", [])
    with pytest.raises(ValueError, match=message):
        data.load("ag-news", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"7,a,b\n1,c,d\n", "row 1 is no"),
        (b"x1,a,b\n1,c,d\n", "row 1 is no"),
        (b"\n1,c,d\n", "row 1 is no"),
        (b"1,caf\xe9,d\n", "train.csv is no table of text in UTF-8"),
        (b"1," + b"a" * 131_073 + b",d\n", "train.csv is no table of text in UTF-8: field larger"),
        (b"", "train.csv has no rows"),
        (b"Class Index,Title,Description\n", "train.csv has no rows"),
    ],
)
def test_ag_news_drops_no_row(tmp_path, content, message):
    for part in ("train", "test"):
        write_csv(tmp_path / "ag_news" / f"{part}.csv", [(1, "a", "b")])
    (tmp_path / "ag_news" / "train.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"dataset='ag-news': .*{message}"):
        data.load("ag-news", tmp_path)


def test_ag_news_with_a_byte_order_mark_has_all_its_rows(tmp_path):
    for part in ("train", "test"):
        write_csv(tmp_path / "ag_news" / f"{part}.csv", [(3, "a", "b")])
    path = tmp_path / "ag_news" / "train.csv"
    path.write_bytes(b"\xef\xbb\xbf" + b"2,a,b\n1,c,d\n")
    assert data.load("ag-news", tmp_path).y.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("femnist", "{", "not a file of LEAF"),
        ("femnist", json.dumps({"users": ["a"], "user_data": {}}), "not a file of LEAF"),
        ("femnist", json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.0] * 783], "y": [1]}}}), "not a file"),
        ("femnist", json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.0] * 784], "y": [62]}}}), "labels 62"),
        ("shakespeare", json.dumps({"users": ["a"], "user_data": {"a": {"x": ["short"], "y": ["a"]}}}), "must have 80"),
        ("shakespeare", json.dumps({"users": ["a"], "user_data": {"a": {"x": ["c" * 80], "y": []}}}), "1 samples x"),
    ],
)
def test_leaf_names_a_bad_file(tmp_path, name, content, message):
    for part in ("train", "test"):
        (tmp_path / name / part).mkdir(parents=True)
    (tmp_path / name / "train" / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=rf"dataset='{name}': .*bad.json.*{message}"):
        data.load(name, tmp_path)


@pytest.fixture(scope="module")
def imported_by_data():
    """The modules of a process that has loaded a data set."""
    code = "import sys, fastfact.data as d; d.load('digits'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_digits_are_those_of_scikit_learn_which_is_not_imported(imported_by_data):
    assert "sklearn" not in imported_by_data
    from sklearn.datasets import load_digits

    raw, digits = load_digits(), data.load("digits")
    x = (torch.from_numpy(raw.images).float().unsqueeze(1) / 16 - 0.3053) / 0.3760
    assert torch.equal(digits.x, x) and digits.y.tolist() == raw.target.tolist()
    assert digits.y.dtype == torch.int64 and digits.classes == tuple(map(str, raw.target_names))


@pytest.mark.parametrize("name", [name for name in data.DATASETS if name != "digits"])
def test_a_missing_data_set_says_what_to_get_and_where_to_put_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets, "DEBIAN", tmp_path / "usr")
    project = {
        "mnist": "torchvision.datasets.MNIST",
        "fashion-mnist": "apt-get install dataset-fashion-mnist",
        "svhn": "ufldl.stanford.edu",
        "cifar10": "cs.toronto.edu",
        "cifar100": "torchvision.datasets.CIFAR100",
        "tiny-imagenet": "cs231n",
        "femnist": "TalwalkarLab/leaf",
        "shakespeare": "preprocess.sh -s niid",
        "ag-news": "Xiang Zhang",
        "mnist-cifar10": "torchvision.datasets.MNIST",
    }[name]
    with pytest.raises(FileNotFoundError) as caught:
        data.load(name, tmp_path / "there")
    text = str(caught.value)
    assert project in text and str(tmp_path / "there") in text and "is missing" in text
    assert not (tmp_path / "there").exists()
    monkeypatch.setenv("FASTFACT_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        data.load(name)


def test_an_empty_leaf_folder_is_missing(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "femnist" / part).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no .json file"):
        data.load("femnist", tmp_path)


def test_without_torchvision_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "svhn").mkdir()
    for part in ("train", "test"):
        (tmp_path / "svhn" / f"{part}_32x32.mat").touch()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=r"read by torchvision, which cannot be imported.*pip install torchvision"):
        data.load("svhn", tmp_path)


def test_data_knows_nothing_of_federations_nor_imports_torchvision(imported_by_data):
    assert "torchvision" not in imported_by_data
    for path in Path(data.__file__).parent.glob("*.py"):
        assert "fastfact.federation" not in path.read_text() and "fastfact.methods" not in path.read_text()


@pytest.mark.parametrize("name", data.DATASETS)
def test_every_data_set_is_described(name):
    assert len(" ".join(data.DATASETS[name].__doc__.split("\n\n")[0].split())) > 40
