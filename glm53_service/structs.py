"""Turns untrusted YAML into frozen structs, reporting every fault at once with its key.

msgspec decodes and stops at the first fault; an operator wants all of them, so each field is converted by
itself.
"""

from __future__ import annotations

import difflib
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from glm53_service.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def load_yaml(text: str, source: str) -> dict[str, Any]:
    """Return the mapping in `text`; ConfigError names `source` and the line when it is none."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(source, [f"not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(data, dict):
        raise ConfigError(source, [f"found {type(data).__name__}, expected a mapping of keys to values"])
    return data


def decode(kind: type[T], data: dict[str, Any], source: str) -> T:
    """Return `data` as a `kind`, or a ConfigError that lists every unknown, missing and wrong key."""
    problems: list[str] = []
    value = _struct(kind, data, "", problems)
    if problems or value is None:
        raise ConfigError(source, problems)
    return value


def _struct(kind: type[T], data: dict[str, Any], path: str, problems: list[str]) -> T | None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"{path}{key}: unknown key; {meant}Known here: {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    before = len(problems)
    for key, field in fields.items():
        if key not in data:
            if field.required:
                problems.append(f"{path}{key}: missing; {_expected(field.type)}")
            continue
        values[field.name] = _field(field.type, data[key], f"{path}{key}", problems)
    return kind(**values) if len(problems) == before else None


def _field(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    inner = _struct_type(kind)
    if inner is not None and isinstance(value, dict):
        return _struct(inner, value, f"{path}.", problems)
    item = _struct_type(get_args(kind)[0]) if get_origin(kind) is tuple else None
    if item is not None and isinstance(value, list):
        return tuple(_item(item, entry, f"{path}[{number}]", problems) for number, entry in enumerate(value))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        expected = _expected(kind) if _literal(kind) else f"{reason[:1].lower()}{reason[1:]}"
        problems.append(f"{path}: found {value!r}; {expected}{_why(kind)}")
        return None


def _item(kind: type[T], entry: Any, path: str, problems: list[str]) -> T | None:
    if isinstance(entry, dict):
        return _struct(kind, entry, f"{path}.", problems)
    problems.append(f"{path}: found {entry!r}, expected a mapping")
    return None


def _struct_type(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a mapping under `kind` is: `kind` itself, or the one struct of an optional."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if get_origin(kind) in (Union, UnionType):
        return next((arg for arg in get_args(kind) if _struct_type(arg)), None)
    return None


def _literal(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for arg in get_args(kind) if (found := _literal(arg))), ())


def _expected(kind: Any) -> str:
    allowed = _literal(kind)
    if not allowed:
        return f"expected {getattr(kind, '__name__', str(kind))}"
    words = ", ".join(map(str, allowed))
    number = next((arg for arg in get_args(kind) if get_origin(arg) is Annotated and not _literal(arg)), None)
    return f"expected {words} or {_number(number)}" if number else f"expected one of {words}"


def _number(kind: Any) -> str:
    """Return `int 1 to 8` for an annotated number with bounds."""
    base, *rest = get_args(kind)
    bounds = next((meta for meta in rest if isinstance(meta, msgspec.Meta)), msgspec.Meta())
    low = bounds.ge if bounds.ge is not None else bounds.gt
    return f"{base.__name__} {low} to {bounds.le}" if bounds.le is not None else f"{base.__name__} >= {low}"


def _why(kind: Any) -> str:
    """Return `: reason` where the annotation of `kind` says why only these values are allowed."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((f": {meta.description}" for meta in metas if getattr(meta, "description", None)), "")
