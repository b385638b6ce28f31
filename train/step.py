"""One training step: draw, gradients summed over accumulation steps, one division, one update.

The step is one jitted function with donated state. A batch lies on the devices as [A, B, S]: A
steps of accumulation of B sequences each. The only denominator is the number of counted elements
of the whole batch, so how it is cut changes nothing. Where batches come from: `feed`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from peagle_jax.sharding import parameter_spec
from train.losses import Sums, add, zero_sums
from train.objective import Objective, loss_sum, value_and_grad
from train.parameters import Params
from train.rows import TargetHead, TrainingRows, draw, training_rows
from train.sampling import rollout_limits
from train.spread import put


class TrainState(NamedTuple):
    """Everything that training changes, and the key that it draws under.

    step: int32 [], steps done. learned: trained parameters, float32. moments: of the optimizer.
    key: typed PRNG key; step s draws under fold_in(key, s).
    """

    step: Array
    learned: Params
    moments: Any
    key: Array


class StepMetrics(NamedTuple):
    """What a step reports: sums over the batch, and float32 [] norm of the mean gradient."""

    sums: Any
    gradient_norm: Array


class Gradients(NamedTuple):
    """How a step gets its gradients.

    prepare: what is known of the whole batch before its gradients, from its masks; of_part: sums
    and gradients of one micro-batch, (learned, frozen, head, rows, numbers, key, prepared).
    """

    prepare: Callable[[Mapping[str, Array]], Any]
    of_part: Callable[..., tuple[Any, Params]]


def init_state(
    learned: Params, optimizer: optax.GradientTransformation, key: Array, mesh: Mesh | None = None
) -> TrainState:
    """The state before the first step. Copies `learned`, because steps donate it."""
    learned = {name: jnp.array(value, copy=True) for name, value in learned.items()}
    if mesh is not None:
        learned = place_parameters(learned, mesh)
    moments = optimizer.init(learned)
    state = TrainState(step=jnp.int32(0), learned=learned, moments=moments, key=key)
    return state if mesh is None else jax.tree.map(put, state, state_shardings(state, mesh))


def place_parameters(params: Mapping[str, Any], mesh: Mesh) -> Params:
    """Parameters on a mesh, by the table of `peagle_jax.sharding`."""
    return {
        name: put(value, NamedSharding(mesh, parameter_spec(name, value.shape, mesh)))
        for name, value in params.items()
    }


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Where each array of a state lives: moments with their parameters, scalars everywhere."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        known = names and names[-1] in state.learned
        spec = parameter_spec(names[-1], leaf.shape, mesh) if known else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map_with_path(place, state)


def peagle_gradients(objective: Objective, table: Array) -> Gradients:
    """Gradients of the P-EAGLE objective under COD draws from the count table."""

    def run(
        learned: Params, frozen: Params, head: TargetHead, rows: TrainingRows,
        numbers: Array, key: Array, prepared: None,
    ) -> tuple[Sums, Params]:  # fmt: skip
        lengths = draw(key, numbers, rows.loss_mask, rows.document_ids, table)
        return value_and_grad(objective, learned, frozen, head, rows, lengths)

    return Gradients(prepare=lambda batch: None, of_part=run)


def make_step(
    gradients: Gradients, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Params, TargetHead, Mapping[str, Array]], tuple[TrainState, Any]]:
    """`step_function`, jitted; donates the state."""
    return jax.jit(step_function(gradients, optimizer), donate_argnums=0)


def step_function(
    gradients: Gradients, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Params, TargetHead, Mapping[str, Array]], tuple[TrainState, Any]]:
    """The step, a pure function: (state, frozen, head, batch) -> (state, StepMetrics).

    A batch holds tokens, loss_mask, document_ids [A, B, S], taps and last_hidden [A, B, S, ..],
    perhaps target_tokens [A, B, S], and numbers [A, B], each sequence's place in the global batch.
    """

    def step(
        state: TrainState, frozen: Params, head: TargetHead, batch: Mapping[str, Array]
    ) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step)
        prepared = gradients.prepare(batch)

        def part(micro: Mapping[str, Array]) -> tuple[Any, Params]:
            rows, numbers = batch_rows(micro), micro["numbers"]
            return gradients.of_part(state.learned, frozen, head, rows, numbers, key, prepared)

        first = jax.tree.map(lambda x: x[0], batch)
        if batch["tokens"].shape[0] == 1:
            sums, grads = part(first)
        else:
            shapes = jax.eval_shape(part, first)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            sums, grads = jax.lax.scan(
                lambda carry, micro: (add(carry, part(micro)), None), zeros, batch
            )[0]
        # A batch without a counted element has gradients of zero, and must not divide by it.
        share = 1.0 / jnp.maximum(sums.count, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g * share, grads)
        norm = optax.tree.norm(grads)
        # optax mixes Python and array numbers; strict promotion is for our own code.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, moments = optimizer.update(grads, state.moments, state.learned)
        learned = optax.apply_updates(state.learned, updates)
        done = TrainState(state.step + jnp.int32(1), learned, moments, state.key)
        return done, StepMetrics(sums=sums, gradient_norm=norm)

    return step


def make_validation(
    objective: Objective,
) -> Callable[[Params, Params, TargetHead, Mapping[str, Array]], Sums]:
    """The jitted sums of a batch with every rollout kept (r = 1), so that depths are comparable."""

    def run(learned: Params, frozen: Params, head: TargetHead, batch: Mapping[str, Array]) -> Sums:
        def part(sums: Sums, micro: Mapping[str, Array]) -> tuple[Sums, None]:
            rows = batch_rows(micro)
            lengths = jax.vmap(lambda m, d: rollout_limits(m, d, objective.num_depths))(
                rows.loss_mask, rows.document_ids
            )
            return add(sums, loss_sum(objective, learned, frozen, head, rows, lengths)[1]), None

        return jax.lax.scan(part, zero_sums(objective.num_depths), batch)[0]

    return jax.jit(run)


@jax.jit
def all_finite(state: TrainState) -> Array:
    """Whether every parameter and moment is finite, Bool []."""
    arrays = jax.tree.leaves((state.learned, state.moments))
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def batch_rows(micro: Mapping[str, Array]) -> TrainingRows:
    """The training rows of one micro-batch [B, S]."""
    names = ("tokens", "taps", "last_hidden", "loss_mask", "document_ids")
    return training_rows(*(micro[name] for name in names), micro.get("target_tokens"))
