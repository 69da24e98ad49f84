"""The command line called in this process, for the tests of its commands."""

import contextlib
import io
import sys

from forked import workers

from fastfact.cli import main as cli
from fastfact.cli import terminal

SMALL = ["--clients", "3", "--rounds", "2", "--epochs", "1", "--model", "mlp", "--width", "0.1", "--batch-size", "64"]


def call(*arguments):
    """`fastfact …` in this process, its workers in forks → (exit code, stdout, stderr), as `main` handles it."""

    out, err, argv, console = io.StringIO(), io.StringIO(), sys.argv, terminal.console
    sys.argv = ["fastfact", *map(str, arguments)]
    file, console.file, console.width = console.file, out, 140
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), workers():
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, console.file = argv, file
    return code, out.getvalue(), err.getvalue()
