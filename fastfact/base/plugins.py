"""Methods and callbacks of one's own, from packages that are installed and files that are named.

A package declares what is to be loaded under the entry point `fastfact.methods`: a class, or the module it is in.

    [project.entry-points."fastfact.methods"]
    nearest = "my_package.nearest:Nearest"

A file or module is named by `fastfact --use`, or by $FASTFACT_USE, several of them separated as in $PATH. Whoever names
one runs its code; nothing that fastfact has written names any.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger("fastfact")

GROUP, VARIABLE = "fastfact.methods", "FASTFACT_USE"
_loaded: set[str] = set()


def load() -> None:
    """Import what is installed and what $FASTFACT_USE names, each once.

    A package that cannot be imported is a warning, since whoever runs the command may not know of it; a file of
    $FASTFACT_USE is a ValueError.
    """
    if GROUP not in _loaded:
        _loaded.add(GROUP)
        for entry in importlib.metadata.entry_points(group=GROUP):
            try:
                entry.load()
            except Exception as error:
                log.warning("%s = %s cannot be loaded: %r", entry.name, entry.value, error)
    for text in _named():
        _import(text)


def use(text: str) -> None:
    """Import a file (PATH.py) or a module, here and in the processes that this one starts. Raises ValueError."""
    if text.endswith(".py"):
        text = str(Path(text).absolute())
    _import(text)
    named = _named()
    if text not in named:
        os.environ[VARIABLE] = os.pathsep.join([*named, text])


def _named() -> list[str]:
    """What $FASTFACT_USE names. A piece that is neither a module nor a whole file is part of a path with separators."""
    named, begun = [], ""
    for piece in os.environ.get(VARIABLE, "").split(os.pathsep):
        text = begun + piece
        begun = "" if text.endswith(".py") or os.sep not in text else text + os.pathsep
        if text and not begun:
            named.append(text)
    return [*named, begun.removesuffix(os.pathsep)] if begun else named


def _import(text: str) -> None:
    if text in _loaded:
        return
    _loaded.add(text)
    try:
        if not text.endswith(".py"):
            importlib.import_module(text)
            return
        if not Path(text).is_file():
            raise FileNotFoundError("there is no such file")
        # Of two files of one name each has its own.
        name = f"fastfact_use_{Path(text).stem}_{hashlib.blake2b(os.fsencode(text), digest_size=4).hexdigest()}"
        spec = importlib.util.spec_from_file_location(name, text)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses, and pickles of its classes, look for the module by its name.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        _loaded.discard(text)
        raise ValueError(f"use={text!r}: cannot be imported: {error!r}") from error
