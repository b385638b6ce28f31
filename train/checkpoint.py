"""Checkpoints of a run: the newest ones and the best, written in the background by orbax.

    FOLDER/last/STEP    the newest `keep`, to resume from
    FOLDER/best/STEP    the one with the highest validation acceptance length
    each with: state (arrays: step, parameters, moments, key), record (JSON: recipe, data, best,
    and a sum over the bits of each array, which is compared on reading)

A folder appears under its name only when it is whole: an interrupted save is never picked.
Arrays are restored onto whatever mesh the resuming run has. An error in the background surfaces at
the next save or at the end.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from train.recipe import differences
from train.step import TrainState, state_shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint says beside its arrays.

    recipe: the resolved recipe. data: position behind the last batch taken. best: highest
    validation acceptance length so far, None before the first.
    """

    recipe: Mapping[str, Any]
    data: Mapping[str, Any]
    best: float | None


class Checkpoints:
    """The checkpoints of one folder. Close it (or use it as a context manager) to finish saves."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        self._folder = Path(folder).absolute()
        self._last = _manager(self._folder / "last", keep)
        self._best = _manager(self._folder / "best", 1)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """The newest complete step, None without any."""
        return self._last.latest_step()

    def has_best(self) -> bool:
        """Whether a validation has chosen a best checkpoint."""
        return self._best.latest_step() is not None

    def check_new(self) -> None:
        """Raise ValueError where there are checkpoints that a new run would be mixed with."""
        step = self.latest()
        if step is not None:
            raise ValueError(
                f"{self._folder}: holds a checkpoint of step {step}; resume it (--resume), or give "
                "an empty folder."
            )

    def save(self, state: TrainState, record: Record, *, best: bool = False) -> None:
        """Start to save; returns as soon as the arrays are copied. A step saved before is kept.

        best: it is the best so far, and goes to the best folder too.
        Raises whatever an earlier save in the background failed with.
        """
        step, stored = int(state.step), _storable(state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(stored),
            record=ocp.args.JsonSave({**dataclasses.asdict(record), "sums": _bit_sums(stored)}),
        )
        for manager in (self._last, self._best) if best else (self._last,):
            manager.check_for_errors()
            if step not in manager.all_steps():
                manager.save(step, args=arguments, force=True)

    def restore(
        self,
        like: TrainState,
        recipe: Mapping[str, Any],
        *,
        mesh: Mesh | None = None,
        best: bool = False,
        step: int | None = None,
    ) -> tuple[TrainState, Record]:
        """The newest (or best) state, laid out as `like` on `mesh`, and its record.

        Raises:
            ValueError: no checkpoint, one that is damaged, or one of a run that differs in more
                than place and pace.
        """
        manager = self._best if best else self._last
        step = manager.latest_step() if step is None else step
        if step is None:
            raise ValueError(f"{self._folder}: no complete checkpoint to resume from.")
        read = self._read(manager, step, record=_JSON).record
        sums = read.pop("sums")
        saved = Record(**read)
        different = differences(saved.recipe, recipe)
        if different:
            raise ValueError(
                f"{self._folder}: step {step} was trained by another recipe: "
                + "; ".join(different)
            )
        wanted = jax.tree.map(_shape, _storable(like))
        if mesh is not None:
            wanted = jax.tree.map(
                lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
                wanted,
                state_shardings(wanted, mesh),
            )
        self._check_arrays(manager, step, wanted)
        found = self._read(manager, step, state=ocp.args.StandardRestore(wanted)).state
        now = _bit_sums(found)
        spoilt = [name for name, value in sums.items() if now[name] != value]
        if spoilt:
            raise self._damaged(manager, step, f"{spoilt[0]} is not what was saved")
        key = jax.random.wrap_key_data(found.key, impl=jax.random.key_impl(like.key))
        return found._replace(key=key), saved

    def _check_arrays(self, manager: ocp.CheckpointManager, step: int, wanted: TrainState) -> None:
        """Raise ValueError unless a checkpoint's own list has the arrays that are wanted.

        Looked at before any array is read: orbax leaves its other reads behind where one fails.
        """
        try:
            saved = manager.item_metadata(step)["state"]
        except KeyError:
            raise self._damaged(manager, step, "Item state was not found") from None
        found = {_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(saved.tree)}
        asked = {_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(wanted)}
        unlike = sorted(name for name in {*found, *asked} if found.get(name) != asked.get(name))
        if unlike:
            listed = ", ".join(
                f"{name} is {found.get(name, 'missing')}, not {asked.get(name, 'in this run')}"
                for name in unlike[:3]
            )
            more = f", and {len(unlike) - 3} more" if len(unlike) > 3 else ""
            raise self._damaged(manager, step, f"{listed}{more}")

    def _read(self, manager: ocp.CheckpointManager, step: int, **items: Any) -> Any:
        try:
            return manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax has no class of its own for what it cannot read
            raise self._damaged(manager, step, " ".join(str(error).split())) from error

    def _damaged(self, manager: ocp.CheckpointManager, step: int, reason: str) -> ValueError:
        folder = self._folder / ("best" if manager is self._best else "last") / str(step)
        return ValueError(
            f"{folder}: cannot be restored ({reason}); without this folder a run goes on from "
            "the checkpoint before."
        )

    def wait(self) -> None:
        """Until everything is on disk. Raises what a save failed with."""
        for manager in (self._last, self._best):
            manager.wait_until_finished()
            manager.check_for_errors()

    def close(self) -> None:
        """Finish the saves under way. Raises what one failed with."""
        try:
            self.wait()
        finally:
            self._last.close()
            self._best.close()


_JSON = ocp.args.JsonRestore()


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
    handlers = {"state": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def _storable(state: TrainState) -> TrainState:
    """Typed keys are stored as their data."""
    return state._replace(key=jax.random.key_data(state.key))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _name(path: tuple[Any, ...]) -> str:
    """A leaf's place in a state, the same for named tuples, dicts and lists."""
    return ".".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)


def _bit_sums(state: TrainState) -> dict[str, int]:
    """Each array's words added up modulo 2**32: the same however it lies on devices."""
    return {
        _name(path): int(value)
        for path, value in jax.tree.leaves_with_path(jax.device_get(_add_bits(state)))
    }


@jax.jit
def _add_bits(state: TrainState) -> TrainState:
    def add(leaf: jax.Array) -> jax.Array:
        words = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        return jnp.sum(jax.lax.bitcast_convert_type(leaf, words), dtype=jnp.uint32)

    return jax.tree.map(add, state)
