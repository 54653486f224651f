"""Each effective value with where it comes from, as data: the file, a default, or what a start chose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from glm53_service.settings import Settings


class Origin(StrEnum):
    """Where a value comes from. DRAFTER and REFIT are choices of a start; RULE follows from other values."""

    FILE = "settings.yaml"
    DEFAULT = "default"
    RULE = "rule"
    DRAFTER = "drafter"
    REFIT = "refit"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One effective value; `key` as settings.yaml spells it."""

    key: str
    value: Any
    origin: Origin


def effective_values(
    settings: Settings, given: Mapping[str, Any], chosen: Iterable[Value] = ()
) -> tuple[Value, ...]:
    """Return every value that has an effect, in the file's order; `given` is the file as it was read.

    A value in `chosen` (the adapter's `resolved`) takes the place of what the file or the default says; the
    other engine's part is left out.
    """
    other = {"vllm": "tensorfold", "tensorfold": "vllm"}[settings.engine]
    replaced = {value.key: value for value in chosen}
    found = [
        replaced.pop(value.key, value)
        for value in _values(settings, given, "")
        if not value.key.startswith(f"{other}.")
    ]
    return (*found, *replaced.values())


def _values(part: msgspec.Struct, given: Any, prefix: str) -> list[Value]:
    found: list[Value] = []
    mapping = given if isinstance(given, Mapping) else {}
    for field in msgspec.structs.fields(part):
        value, key = getattr(part, field.name), f"{prefix}{field.encode_name}"
        if isinstance(value, msgspec.Struct):
            found += _values(value, mapping.get(field.encode_name), f"{key}.")
        else:
            origin = Origin.FILE if field.encode_name in mapping else Origin.DEFAULT
            found.append(Value(key=key, value=msgspec.to_builtins(value), origin=origin))
    return found
