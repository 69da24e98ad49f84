"""Command lines and TOML files: a configuration, or one line that says what is wrong with it."""

import contextlib
import io
import logging
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import torch
from hypothesis import strategies as st

import fastfact.cli.main as cli
from fastfact.experiment import build
from fastfact.experiment.config import Config, read_file, with_settings
from tests.fuzz._common import JSON, mutations, repeated

FOLDER = tempfile.TemporaryDirectory()
ROOT = Path(FOLDER.name)
NAMES = [item.name for item in fields(Config)]
EXAMPLE = b"""method = "factorized-fl-alpha"
clients = 4
rounds = 2
lr = 1e-2
clip = "2x"
cohort = 1
max-norm = "50x"
[settings.factorized-fl-alpha]
tau = 0.5
epsilon = 2
skip = ["fc"]
[simulation]
hidden = 4
"""
WORDS = st.sampled_from(
    [
        *("0", "1", "2", "-1", "0.5", "1e30", "nan", "inf", "-inf", "1x", "0x", "x", "true", "false", "none", "None"),
        *("auto", "threads", "memory", "1,2", "a,b", "digits", "iid", "", " ", "\n", "=", "'", '"', "[", "9" * 40),
        *("../x", "/dev/null", "é", "\x1b[1m", "%s", "{}", "--", "-"),
    ]
)


def one_line(error: Exception) -> None:
    assert isinstance(error, ValueError) and str(error) and "\n" not in str(error), repr(error)


def toml(data) -> None:
    path = ROOT / "x.toml"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(mutations(EXAMPLE) | st.binary(max_size=60)))
    else:
        lines = [
            f"{data.draw(st.sampled_from(NAMES))} = {data.draw(JSON | WORDS)!r}"
            for _ in range(data.draw(st.integers(1, 3)))
        ]
        path.write_text("\n".join(lines).replace("None", "[]").replace("True", "true").replace("False", "false"))
    try:
        values = read_file(path)
        with_settings(Config(**values), [])
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) or "config=" in str(error)


def settings(data) -> None:
    """Python values for every setting, and a federation of what is accepted."""
    values = {data.draw(st.sampled_from(NAMES)): data.draw(JSON | WORDS) for _ in range(data.draw(st.integers(1, 3)))}
    try:
        config = with_settings(
            Config(**values), data.draw(st.lists(WORDS.map(lambda w: f"mu={w}") | WORDS, max_size=1))
        )
    except (ValueError, OSError) as error:
        one_line(error)
        return
    if (
        data.draw(st.integers(0, 9))
        or config.clients > 50
        or config.width > 4
        or config.pretrain
        or config.samples > 500
    ):
        return
    try:
        build.check(config)
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error).strip(), repr(error)


def command_line(data) -> None:
    """What the commands are given by people; nothing is trained."""
    # The others need no checks of their own, or take seconds.
    command = data.draw(st.sampled_from(["run", "compare", "resume", "verify", "report"]))
    flags = [f"--{name.replace('_', '-')}" for name in NAMES]
    flags += ["--out", "--set", "--config", "--json", "--resume", "--seeds", "--methods", "--jobs", "--plan", "--help"]
    words = [command]
    for _ in range(data.draw(st.integers(0, 4))):
        words += [data.draw(st.sampled_from(flags) | WORDS)]
        if data.draw(st.integers(0, 3)):
            words += [data.draw(WORDS | st.text(max_size=4) | st.sampled_from(flags))]
    if command in ("run", "compare"):
        words += ["--out", str(ROOT / "out")]
    # A null byte ends an argument before the program sees it.
    words = [word.replace("\0", "").replace("/dev/null", str(ROOT / "none")) for word in words]
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fastfact", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    assert code in (0, 1, 2), (words, code)
    if code:
        lines = [line for line in err.getvalue().splitlines() if line.startswith("fastfact: ")]
        assert lines and "Traceback" not in err.getvalue(), (words, err.getvalue())


CASES = {"toml": toml, "settings": settings, "command line": command_line}


def run(seconds: float, number: int) -> int:
    """See `_common.repeated`."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    trains, compares = cli._train, cli._compare
    cli._train = lambda *_: None
    cli._compare = lambda *_: None
    try:
        return repeated(CASES, seconds, number)
    finally:
        cli._train, cli._compare = trains, compares
