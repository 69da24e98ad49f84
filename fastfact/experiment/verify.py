"""Whether what a run, a comparison or a store of clients left is as it was written. No model is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastfact.base import files
from fastfact.experiment import probes, report
from fastfact.experiment.run import STARTED
from fastfact.federation.storage import checkpoint, run_directory
from fastfact.federation.storage.states import DATABASE


def verify(directory: Path) -> dict[str, str | None]:
    """Path → what is wrong there; None where every digest is right, or where there are none (an earlier version).

    Raises ValueError for a directory that holds none of these.
    """
    if (directory / report.COMPARISON).is_file():
        found = {str(directory / report.COMPARISON): _problem(files.read_sealed, directory / report.COMPARISON)}
        for cell in sorted((directory / report.CELLS).glob("*/")):
            found |= verify(cell) if not files.is_vacant(cell, STARTED) else {str(cell): None}
        return found
    if not (directory / DATABASE).is_file():
        run_directory.read_config(directory)
    found = {str(directory): _problem(checkpoint.about, directory, verify=True)}
    for name in (STARTED, report.RESULT):
        if (directory / name).is_file():
            found[str(directory / name)] = _problem(files.read_sealed, directory / name)
    for path in sorted([*directory.glob(report.SIMILARITY), *(directory / probes.FOLDER).glob("*.safetensors")]):
        found[str(path)] = _problem(run_directory.load_tensors, path, {}, also=("",))
    return found


def _problem(read: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    try:
        read(*args, **options)
    except (ValueError, OSError) as error:
        return " ".join(str(error).split())
    return None
