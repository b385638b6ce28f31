"""Recipes: everything about a training run, as frozen dataclasses read from TOML.

An unknown key, a value of another type, or one outside its range is an error that names the key.
`resolved` is what a run writes beside its checkpoints; `differences` is what resuming compares.
"""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from train.optimizer import OptimizerConfig
from train.sampling import CodConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetPart:
    """The target. path: folder, .gguf file or name. dtype: None is the device's usual."""

    path: str
    dtype: Literal["float32", "bfloat16"] | None = None
    keep_packed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterPart:
    """The drafter to start from.

    start: "new", "target-layers" (matrices of the target's last layers where they fit), or "head"
    (the folder `path`, whose own sizes then hold). taps: None is (2, L // 2, L - 3). mask_token_id:
    None asks for the first id that the tokenizer leaves unused. draft_vocab_size: None is all.
    vocabulary: prepared data set whose token counts choose the draft vocabulary; None is the
    training data, which then must be prepared rows, as a store of hidden states has no counts.
    intermediate_size: None is the target's, or 3 x hidden for a target of experts.
    """

    start: Literal["new", "target-layers", "head"] = "new"
    path: str | None = None
    num_layers: int = 4
    style: Literal["llama", "qwen3"] = "llama"
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    vocabulary: str | None = None
    intermediate_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPart:
    """What is trained on.

    path: a prepared data set (the target then runs along), or a store of hidden states.
    validation: another such folder; else `validation_rows` rows are held out of `path`.
    """

    path: str
    validation: str | None = None
    validation_rows: int = 0
    sequence_length: int = 8192
    pack: bool = True
    read_threads: int = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectivePart:
    """The objective. `kind` "eagle-3" trains by training-time test over `unroll_steps` steps.

    num_depths, ratio, min_ratio: of COD sampling. chunk_rows: slots of a rollout chunk; None is a
    24th of the rollout rows, at most 2,048. num_segments: of Algorithm 1. decay: weight of step t
    of EAGLE-3 is decay ** t.
    """

    kind: Literal["p-eagle", "eagle-3"] = "p-eagle"
    num_depths: int = 8
    ratio: float = 0.8
    min_ratio: float = 0.0
    loss: Literal["kl", "soft_ce", "ce", "tv", "nla", "lk_hybrid"] = "kl"
    outside: Literal["renormalise", "drop"] = "renormalise"
    partition: Literal["structured", "algorithm-1"] = "structured"
    chunk_rows: int | None = None
    num_segments: int = 8
    unroll_steps: int = 7
    decay: float = 1.0

    @property
    def cod(self) -> CodConfig:
        return CodConfig(num_depths=self.num_depths, ratio=self.ratio, min_ratio=self.min_ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPart:
    """How long and what. `steps` or `epochs`, one of them. dtype: of the computation; None is
    float32 on CPU and bfloat16 on a GPU. embedding, head: see `parameters.Trained`."""

    epochs: int | None = None
    steps: int | None = None
    global_batch: int = 8
    accumulation: int = 1
    embedding: Literal["table", "mask-row", "frozen"] = "table"
    head: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshPart:
    """Sizes of the mesh axes; all 1 is one device without a mesh."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPart:
    """Where a run writes and how often (in steps; 0 is never)."""

    folder: str
    save_every: int = 500
    keep: int = 2
    validate_every: int = 500
    log_every: int = 10
    tensorboard: bool = False
    picture: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    target: TargetPart
    data: DataPart
    output: OutputPart
    drafter: DrafterPart = DrafterPart()
    objective: ObjectivePart = ObjectivePart()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainPart = TrainPart()
    mesh: MeshPart = MeshPart()

    def __post_init__(self):
        for name, least in _LEAST.items():
            section, _, key = name.partition(".")
            value = getattr(getattr(self, section), key)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; at least {least}.")
        if (self.train.steps is None) == (self.train.epochs is None):
            raise ValueError("train: give either steps or epochs.")
        if self.train.seed > MAX_SEED:
            raise ValueError(f"train.seed is {self.train.seed}; at most {MAX_SEED}.")
        if self.data.validation is not None and self.data.validation_rows:
            raise ValueError("data: give either validation or validation_rows.")
        for key in ("ratio", "min_ratio", "decay"):
            value = getattr(self.objective, key)
            if not 0 <= value < math.inf:
                raise ValueError(f"objective.{key} is {value}; a number from 0 on is needed.")
        if (self.drafter.start == "head") != (self.drafter.path is not None):
            raise ValueError('drafter: path belongs to start = "head", and it needs one.')
        if self.objective.kind == "p-eagle":
            try:
                _ = self.objective.cod
            except ValueError as error:
                raise ValueError(f"objective.{error}") from None
            longest, chunk = self.objective.num_depths - 1, self.objective.chunk_rows
            if chunk is not None and chunk < longest:
                raise ValueError(
                    f"objective.chunk_rows is {chunk}; at least {longest}, one whole rollout."
                )
        if self.drafter.taps == ():
            raise ValueError("drafter.taps is empty; name at least one layer.")


MAX_SEED = 2**32 - 1
"""What every generator of random numbers here takes."""

# Smallest value of each whole number.
_LEAST = {
    "data.sequence_length": 2,
    "data.validation_rows": 0,
    "data.read_threads": 0,
    "drafter.num_layers": 1,
    "drafter.mask_token_id": 0,
    "drafter.draft_vocab_size": 1,
    "drafter.intermediate_size": 1,
    "objective.chunk_rows": 1,
    "objective.num_segments": 1,
    "objective.unroll_steps": 1,
    "train.epochs": 1,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.accumulation": 1,
    "train.seed": 0,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "mesh.sequence": 1,
    "output.save_every": 0,
    "output.keep": 1,
    "output.validate_every": 0,
    "output.log_every": 1,
}

# What may differ between a run and its resumption: where and how often, not what.
_FREE = ("mesh", "output", "data.read_threads", "target.path", "data.path", "data.validation",
    "drafter.vocabulary",
)  # fmt: skip


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; each override is `section.key=value`, the value in TOML or a bare word.

    Raises:
        ValueError: naming file and key.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) != 2:
            raise ValueError(f"override {override!r}: expected section.key=value.")
        section = content.setdefault(parts[0], {})
        if not isinstance(section, dict):
            raise ValueError(f"override {override!r}: {parts[0]} is no section.")
        section[parts[1]] = _value(text.strip())
    try:
        return parse(Recipe, content, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(kind: type, content: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a mapping. Raises ValueError naming the key, under `where`."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(content) - set(fields))
    if unknown:
        known = ", ".join(fields)
        raise ValueError(f"unknown key {where}{unknown[0]}; known here: {known}.")
    values = {}
    for name, field in fields.items():
        if name in content:
            values[name] = _convert(hints[name], content[name], f"{where}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}{name} is missing.")
    try:
        return kind(**values)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if not where else f"{where}{message}") from None


def resolved(recipe: Any) -> dict[str, Any]:
    """The recipe with all defaults, as JSON values."""
    values = dataclasses.asdict(recipe)
    return _plain(values)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """Keys in which two resolved recipes differ and may not, with both values."""
    found = []
    for name in sorted({*saved, *now}):
        key = f"{where}{name}"
        if key in _FREE:
            continue
        old, new = saved.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{key}.")
        elif old != new:
            found.append(f"{key}: saved {old!r}, now {new!r}")
    return found


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a section, found {value!r}.")
        return parse(hint, value, f"{where}.")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return _convert(hint, value, where)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(str, arguments))
            raise ValueError(f"{where} is {value!r}; choose one of {choices}.")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, found {value!r}.")
        return tuple(_convert(arguments[0], item, where) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} must be of type {hint.__name__}, found {value!r}.")
    return value


def _value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
