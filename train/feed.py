"""From a process's batches on the host to global arrays on the devices, target states included.

One iterator for both ways: a source with stored hidden states is put on the devices as it is; for a
source without, the frozen target runs here, one batch ahead of the step that trains on it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from peagle_jax.models.target import Target
from train.data.pack import STATES
from train.data.pipeline import Batches
from train.spread import BATCH_AXES, batch_shards, put

_FIELDS = ("tokens", "loss_mask", "document_ids", "positions", *STATES)
# (tokens, document_ids, positions [A, B, S]) -> taps and last hidden states [A, B, S, ..].
StatesFn = Callable[[Array, Array, Array], tuple[Array, Array]]


def check_batch(global_batch: int, accumulation: int, processes: int, mesh: Mesh | None) -> None:
    """Raise ValueError where a batch cannot be cut into accumulation steps, processes, shards."""
    shards = batch_shards(mesh)
    if global_batch % (accumulation * processes) or (global_batch // accumulation) % shards:
        raise ValueError(
            f"global_batch is {global_batch}; it must be a multiple of accumulation "
            f"{accumulation} x processes {processes}, and each accumulation step of the "
            f"{shards} batch shards of the mesh (data x fsdp)."
        )


def on_devices(
    part: Mapping[str, np.ndarray],
    *,
    accumulation: int,
    mesh: Mesh | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> dict[str, Array]:
    """This process's part [b, S, ..] of a batch as global arrays [A, B, S, ..].

    Hidden states are spread over the sequence axis too. Adds `numbers` [A, B]: the place of each
    sequence in the global batch, which is what draws are keyed by.
    """
    arrays = {name: part[name] for name in _FIELDS if name in part}
    rows = len(part["tokens"])
    arrays["numbers"] = np.arange(rows, dtype=np.int32) + np.int32(process_index * rows)

    def place(values: np.ndarray) -> Array:
        values = values.reshape(accumulation, rows // accumulation, *values.shape[1:])
        if mesh is None:
            return jnp.asarray(values)
        sharding = NamedSharding(mesh, _spec(values.ndim))
        if process_count == 1:
            # Every process has the whole batch and puts its own devices' share there.
            return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])
        whole = (accumulation, values.shape[1] * process_count, *values.shape[2:])
        return jax.make_array_from_process_local_data(sharding, values, whole)

    return {name: place(values) for name, values in arrays.items()}


def reading(mesh: Mesh | None) -> tuple[int, int]:
    """Which part of how many parts of a batch this process reads.

    Processes that share the shards of one sequence all read the whole batch.

    Raises:
        ValueError: the batch shards are neither one nor a multiple of the processes.
    """
    shards, processes = batch_shards(mesh), jax.process_count()
    if shards == 1:
        return 0, 1
    if shards % processes:
        raise ValueError(
            f"data x fsdp is {shards}; it must be 1 or a multiple of the {processes} processes."
        )
    return jax.process_index(), processes


def on_mesh(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays that are not on the mesh yet, copied to all its devices; the others as they are."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Array) -> Array:
        there = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        return x if there else put(x, everywhere)

    return jax.tree.map(place, tree)


def _spec(axes: int) -> PartitionSpec:
    """Of [A, B, S, ..]: wide rows go over the sequence axis, narrow ones are needed whole."""
    if axes < 4:
        return PartitionSpec(None, BATCH_AXES, *[None] * (axes - 2))
    return PartitionSpec(None, BATCH_AXES, "sequence", *[None] * (axes - 3))


def target_states(target: Target, taps: tuple[int, ...], mesh: Mesh | None = None) -> StatesFn:
    """The frozen target on a batch: taps and last hidden states (after the final norm).

    The target may live on a mesh of its own devices' choosing; the states are laid out for the
    drafter's `mesh`.
    """
    graph, params = nnx.split(target)
    params = on_mesh(params, mesh)

    def run(
        params: Any, tokens: Array, document_ids: Array, positions: Array
    ) -> tuple[Array, Array]:
        model = nnx.merge(graph, params)
        real = document_ids >= 0

        def one(arrays: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            tokens, positions, documents = arrays
            out = model(tokens, positions, taps=taps, segment_ids=documents)
            return out.taps, out.hidden

        states = jax.lax.map(one, (tokens, jnp.where(real, positions, -1), document_ids))
        # Padding rows hold whatever the target makes of them; nothing may depend on it.
        return jax.tree.map(lambda x: jnp.where(real[..., None], x, 0), states)

    laid_out = None if mesh is None else (NamedSharding(mesh, _spec(4)),) * 2
    jitted = jax.jit(run, out_shardings=laid_out)
    return lambda tokens, documents, positions: jitted(params, tokens, documents, positions)


def feed(
    batches: Batches,
    place: Callable[[Mapping[str, np.ndarray]], dict[str, Array]],
    states: StatesFn | None,
) -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
    """Batches on the devices, with target states, and the position behind each.

    The next batch is read, and the target run on it, before the one before is given out, so that
    the devices always have work queued.

    Raises:
        ValueError: the source has no states and there is no target to compute them.
    """
    ahead: tuple[dict[str, Array], dict[str, Any]] | None = None
    for part in batches:
        position = batches.state()
        batch = place(part)
        if states is not None:
            found = states(batch["tokens"], batch["document_ids"], batch["positions"])
            batch["taps"], batch["last_hidden"] = found
        elif "taps" not in batch:
            raise ValueError("the data holds no hidden states, and no target is given.")
        del batch["positions"]
        if ahead is not None:
            yield ahead
        ahead = batch, position
    if ahead is not None:
        yield ahead
