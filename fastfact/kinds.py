"""Whether settings are of the types their dataclass says."""

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any

_NAMES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a table",
    NoneType: "None",
}


def type_error(value: Any, kind: Any) -> str | None:
    """What `value` must be for the annotation `kind`, in words; None if it is that, or `kind` is none of these types
    or a union of them. An integer is a number, True is not an integer.
    """
    allowed = kind.__args__ if isinstance(kind, UnionType) else (kind,)
    if not all(isinstance(one, type) and one in _NAMES for one in allowed):
        return None
    if isinstance(value, bool):
        fits = bool in allowed
    else:
        fits = isinstance(value, allowed) or (isinstance(value, int) and float in allowed)
    return None if fits else " or ".join(_NAMES[one] for one in allowed)


must_be = type_error


def check_kinds(settings: Any, name: str) -> None:
    """Raise ValueError for a field of the dataclass `settings`, called `name`, whose value is of another type."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if rule := type_error(value, field.type):
            raise ValueError(f"{name}({field.name}={value!r}): must be {rule}")
