"""The EAGLE-3 objective: training-time test, the drafter unrolled on its own hidden states.

Step 0 is the depth-0 stream. Step t feeds row p the hidden state that step t - 1 gave at row p and
the token of row p + t, at position p + t; it sees the depth-0 keys up to p and its own keys of
steps 1 .. t, as drafting one token at a time from row p would, and is scored against the target at
row p + t. (EAGLE-3, arXiv 2503.01840, section on training-time test.)

The loss is the sum over steps of decay ** t times the mean over the step's supervised rows, the
mean being over the whole batch. `Sums` has the steps as depths; its loss is scaled by the rows of
step 0, so that the caller's one division by `count` gives that sum.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle_jax.models.drafter import Drafter
from peagle_jax.models.layers import attention_scale
from train.forward import Stream, depth_zero, embed_rows, run_layer
from train.losses import LossSettings, Sums, add, losses_of, target_labels, zero_sums
from train.parameters import Params, build_drafter
from train.rows import TargetHead, TrainingRows
from train.spread import attend_unrolled, place_rows
from train.step import Gradients, batch_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unroll(LossSettings):
    """Everything about the EAGLE-3 objective that is not an array.

    num_steps: T, steps unrolled. decay: weight of step t is decay ** t.
    """

    num_steps: int = 7
    decay: float = 1.0

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"unroll_steps is {self.num_steps}; it must be at least 1.")


def supervised_rows(rows: TrainingRows, step: int) -> Array:
    """Rows that step t is scored at: row p + t is supervised and of p's document, Bool [B, n]."""
    mask = _shifted(rows.loss_mask, step, False)
    same = _shifted(rows.document_ids, step, -1) == rows.document_ids
    return mask & same & (rows.document_ids >= 0)


def step_weights(unroll: Unroll, counts: Float[Array, " T"]) -> Float[Array, " T"]:
    """Weight of each step's loss sum, given the supervised rows of each in the whole batch."""
    decay = jnp.float32(unroll.decay) ** jnp.arange(unroll.num_steps, dtype=jnp.float32)
    return decay * jnp.maximum(counts[0], 1.0) / jnp.maximum(counts, 1.0)


def unroll_loss(
    unroll: Unroll,
    learned: Params,
    frozen: Params,
    head: TargetHead,
    rows: TrainingRows,
    weights: Float[Array, " T"],
) -> tuple[Float[Array, ""], Sums]:
    """Sum over steps of weight times loss sum, differentiable by `learned`, and the counts."""
    params = {**frozen, **learned}
    labels = target_labels(unroll, frozen, head, rows)
    drafter = build_drafter(unroll.config, params, unroll.dtype)
    stream = depth_zero(drafter, rows, mesh=unroll.mesh, implementation=unroll.implementation)
    fed, hidden = _feedback(drafter, stream), stream.hidden
    chain: list[tuple[tuple[Array, Array], ...]] = []
    total, sums = jnp.float32(0), zero_sums(unroll.num_steps)
    right = rows.loss_mask
    for step in range(unroll.num_steps):
        if step:
            again = jax.checkpoint(
                lambda fed, chain, stream, step=step: _step(
                    unroll, drafter, stream, rows, fed, chain, step
                )
            )
            hidden, fed, own = again(fed, chain, stream)
            chain = [*chain, own]
        supervised = supervised_rows(rows, step)
        shifted = None if labels is None else _shifted(labels, step, 0)
        loss, count, correct = losses_of(
            unroll,
            params,
            hidden,
            head,
            _shifted(rows.last_hidden, step, 0),
            shifted,
            supervised,
        )
        served = supervised & rows.loss_mask
        right = right & correct
        at = jnp.zeros((unroll.num_steps,), jnp.int32).at[step]
        masks = (correct, supervised, right & served, served)
        counts = (at.set(jnp.sum(mask, dtype=jnp.int32)) for mask in masks)
        total = total + weights[step] * loss
        # The denominator is that of step 0: the weights bring the other steps to it.
        own_count = count if step == 0 else jnp.int32(0)
        sums = add(sums, Sums(weights[step] * loss, own_count, *counts))
    return total, sums


def eagle3_gradients(unroll: Unroll) -> Gradients:
    """Gradients of the EAGLE-3 objective for `step.make_step`."""

    def prepare(batch: Mapping[str, Array]) -> Array:
        return step_weights(unroll, _counts(unroll, batch))

    def run(
        learned: Params, frozen: Params, head: TargetHead, rows: TrainingRows,
        numbers: Array, key: Array, weights: Array,
    ) -> tuple[Sums, Params]:  # fmt: skip
        del numbers, key
        (_, sums), grads = jax.value_and_grad(
            lambda p: unroll_loss(unroll, p, frozen, head, rows, weights), has_aux=True
        )(learned)
        return sums, grads

    return Gradients(prepare=prepare, of_part=run)


def make_unroll_validation(unroll: Unroll) -> Callable[..., Sums]:
    """The jitted sums of a validation batch."""

    def run(learned: Params, frozen: Params, head: TargetHead, batch: Mapping[str, Array]) -> Sums:
        weights = step_weights(unroll, _counts(unroll, batch))

        def part(sums: Sums, micro: Mapping[str, Array]) -> tuple[Sums, None]:
            rows = batch_rows(micro)
            return add(sums, unroll_loss(unroll, learned, frozen, head, rows, weights)[1]), None

        return jax.lax.scan(part, zero_sums(unroll.num_steps), batch)[0]

    return jax.jit(run)


def _counts(unroll: Unroll, batch: Mapping[str, Array]) -> Float[Array, " T"]:
    """Supervised rows of each step in the whole batch."""
    merged = {
        name: batch[name].reshape(-1, batch[name].shape[-1])
        for name in ("tokens", "loss_mask", "document_ids")
    }
    tokens = merged["tokens"]
    nothing = jnp.zeros((*tokens.shape, 1), jnp.float32)
    rows = batch_rows({**merged, "taps": nothing, "last_hidden": nothing})
    return jnp.stack(
        [
            jnp.sum(supervised_rows(rows, step), dtype=jnp.int32).astype(jnp.float32)
            for step in range(unroll.num_steps)
        ]
    )


def _step(
    unroll: Unroll,
    drafter: Drafter,
    stream: Stream,
    rows: TrainingRows,
    fed: Array,
    chain: list[tuple[tuple[Array, Array], ...]],
    step: int,
) -> tuple[Array, Array, tuple[tuple[Array, Array], ...]]:
    """Step t: final hidden states, what is fed back, and its keys and values per layer."""
    embedded = place_rows(embed_rows(drafter, _shifted(rows.tokens, step, 0)), unroll.mesh)
    positions = rows.positions + jnp.int32(step)
    x, own = fed, []
    for index, layer in enumerate(drafter.layers):

        def attend(q: Array, k: Array, v: Array, layer: Any = layer, index: int = index) -> Array:
            earlier = [past[index] for past in chain]
            keys = jnp.stack([*(past[0] for past in earlier), k], axis=2)
            values = jnp.stack([*(past[1] for past in earlier), v], axis=2)
            prefix = (stream.keys[index].astype(k.dtype), stream.values[index].astype(v.dtype))
            return attend_unrolled(
                q,
                prefix,
                (keys, values),
                step,
                rows.document_ids,
                scale=attention_scale(layer),
                window=layer.layer.window,
                mesh=unroll.mesh,
                implementation=unroll.implementation,
            )

        x, k, v = run_layer(layer, index == 0, embedded, x, positions, attend, unroll.mesh)
        own.append((k, v))
    hidden = drafter.finish(x)
    return hidden, hidden if unroll.config.norm_output else x, tuple(own)


def _feedback(drafter: Drafter, stream: Stream) -> Array:
    return stream.hidden if drafter.config.norm_output else stream.residual


def _shifted(values: Array, step: int, fill: Any) -> Array:
    """Row p takes the value of row p + step; rows past the end take `fill`."""
    if step == 0:
        return values
    kept = values[:, step:]
    pad = [(0, 0), (0, values.shape[1] - kept.shape[1])] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(kept, pad, constant_values=fill)
