"""What the settings of a dataclass are: types from their annotations; help, unit and range from their metadata."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
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
_HOLDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}

Choices = Iterable[str] | Callable[[], Iterable[str]]


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    group: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Choices = (),
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """A field of a dataclass that says what it is; `value_error` holds values against it.

    help: a sentence for people. unit: what numbers are counted in. group: what the setting stands beside in help.
    at_least, above, at_most, below: the range of a number. choices: the strings allowed, or a function that lists them,
    for lists that are expensive to make. check(value) → what the value must be, in words, or None if it is that.
    None is allowed wherever the annotation allows it.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    about = {"help": help, "unit": unit, "group": group, "choices": choices, "check": check, **bounds}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=about)
    return field(default=default, metadata=about)


def like(settings: type, name: str, default: Any = MISSING, **change: Any) -> Any:
    """A field that is what `name` is in another dataclass, but for a default of its own and these changes of
    metadata."""
    item = next(item for item in fields(settings) if item.name == name)
    return field(default=item.default if default is MISSING else default, metadata={**item.metadata, **change})


def type_error(value: Any, kind: Any) -> str | None:
    """What `value` must be for the annotation `kind`, in words; None if it is that, or `kind` is none of these types
    or a union of them. An integer is a number, True is not an integer.
    """
    allowed = _allowed(kind)
    if not allowed:
        return None
    if isinstance(value, bool):
        fits = bool in allowed
    else:
        fits = isinstance(value, allowed) or (isinstance(value, int) and float in allowed)
    return None if fits else " or ".join(_NAMES[one] for one in allowed)


@functools.cache
def _allowed(kind: Any) -> tuple[type, ...]:
    """The types of an annotation, none where one of them is another than these."""
    allowed = kind.__args__ if isinstance(kind, UnionType) else (kind,)
    return allowed if all(isinstance(one, type) and one in _NAMES for one in allowed) else ()


def choices_of(item: Field) -> tuple[str, ...]:
    """The strings a field allows; empty for all."""
    choices = item.metadata.get("choices", ())
    return tuple(choices() if callable(choices) else choices)


def value_error(value: Any, item: Field) -> str | None:
    """What `value` must be for a field of a dataclass, in words; None if it is that: of the field's type and, if it was
    made by `setting`, in its range."""
    if rule := type_error(value, item.type):
        return rule
    if value is None or not item.metadata:
        return None
    if (known := choices_of(item)) and value not in known:
        return f"one of {', '.join(known)}"
    if isinstance(value, int | float) and not isinstance(value, bool) and (rule := _out_of_range(value, item.metadata)):
        return rule
    return item.metadata["check"](value) if item.metadata.get("check") else None


def _out_of_range(value: float, about: Mapping[str, Any]) -> str | None:
    bounds = {name: about[name] for name in _HOLDS if about.get(name) is not None}
    if not math.isfinite(value):
        return "a finite number"
    if all(_HOLDS[name](value, bound) for name, bound in bounds.items()):
        return None
    return " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())


def check_kinds(settings: Any, name: str) -> None:
    """Raise ValueError for a field of the dataclass `settings`, called `name`, that is not what it must be."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if rule := value_error(value, item):
            raise ValueError(f"{name}({item.name}={value!r}): must be {rule}")
