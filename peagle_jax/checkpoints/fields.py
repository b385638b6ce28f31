"""Typed reading of JSON objects from checkpoint folders; every error names the file and the key."""

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

PathLike = str | os.PathLike[str]

_REQUIRED = object()


class CheckpointError(ValueError):
    """A checkpoint file is missing, damaged, or asks for something that is not supported."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """One JSON object: `where` is the file, `prefix` the dotted path of the object inside it.

    A null value counts as absent: the default is taken, or an error raised where there is none.
    """

    raw: Mapping[str, Any]
    where: str
    prefix: str = ""

    def has(self, key: str) -> bool:
        """Whether `key` is there with a value other than null."""
        return self.raw.get(key) is not None

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise CheckpointError for `key`: what was expected and what the file holds."""
        found = f"found {self.raw[key]!r}" if key in self.raw else "the key is missing"
        raise CheckpointError(f"{self.where}: {self.prefix}{key}: expected {expected}, {found}")

    def child(self, key: str) -> "Fields":
        """The object under `key`."""
        value = self.raw.get(key)
        if not isinstance(value, Mapping):
            self.fail(key, "an object")
        return Fields(value, self.where, f"{self.prefix}{key}.")

    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> Any:
        """An integer of at least `minimum`, or the default."""
        value = self._value(key, default, f"an integer >= {minimum}")
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fail(key, f"an integer >= {minimum}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number above zero as float, or the default."""
        value = self._value(key, default, "a number > 0")
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, "a number > 0")
        if not math.isfinite(value) or value <= 0:
            self.fail(key, "a number > 0")
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """True or false, or the default."""
        value = self._value(key, default, "true or false")
        if value is not default and not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string, or the default."""
        value = self._value(key, default, "a string")
        if value is not default and not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def either(self, keys: Collection[str], default: Any = _REQUIRED, *, minimum: int = 1) -> Any:
        """An integer that different writers store under different keys; two must agree."""
        present = [key for key in keys if self.has(key)]
        values = {key: self.integer(key, minimum=minimum) for key in present}
        if len(set(values.values())) > 1:
            self.fail(present[0], f"the same value as {self.prefix}{present[1]} ({values})")
        if present:
            return values[present[0]]
        if default is _REQUIRED:
            self.fail(" or ".join(keys), f"an integer >= {minimum}")
        return default

    def only(self, key: str, allowed: Collection[Any], why: str) -> None:
        """Refuse any value of `key` outside `allowed`; an absent or null key is fine."""
        if self.has(key) and not any(_same(self.raw[key], value) for value in allowed):
            values = ", ".join(repr(value) for value in allowed) or "nothing"
            self.fail(key, f"{values} or no such key ({why})")

    def _value(self, key: str, default: Any, expected: str) -> Any:
        if self.has(key):
            return self.raw[key]
        if default is _REQUIRED:
            self.fail(key, expected)
        return default


def _same(left: Any, right: Any) -> bool:
    """Equality that keeps false apart from 0 and true from 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def read_json(path: PathLike) -> Fields:
    """The JSON object in the file at `path`; CheckpointError when absent or not a JSON object."""
    file = Path(path)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not a JSON file ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    return Fields(raw, str(file))
