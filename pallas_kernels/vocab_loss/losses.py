"""The losses as functions of per-row statistics, and their derivative by the draft logits.

Reference and kernels share these formulas: they are plain jnp on blocks of rows x columns.

With q = softmax(draft logits), p = softmax(target logits), both over the draft vocabulary, and
acceptance = sum_v min(p_v, q_v), every loss here has, row by row, a derivative of the form

    d loss / d z_v = a (q_v - p_v) + b (q_v - [v = label]) + c q_v ([q_v < p_v] - below)

where below = sum_v q_v [q_v < p_v] and c multiplies d acceptance / d z_v. So one pass over the
logits serves them all; only the three row factors differ.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# name -> whether the loss needs the acceptance before its derivative can be formed
LOSSES = {
    "kl": False,  # sum p log(p / q)
    "soft_ce": False,  # -sum p log q
    "ce": False,  # -log q[argmax p]
    "tv": True,  # 1 - acceptance = sum |p - q| / 2
    "nla": True,  # -log(acceptance)
    "lk_hybrid": True,  # w kl + (1 - w) tv with w = exp(-3 acceptance), a constant
}
# Below it -log(acceptance) is cut off, with derivative zero.
SMALLEST_ACCEPTANCE = 1e-5
LK_DECAY = 3.0


class Statistics(NamedTuple):
    """What one pass over the vocabulary leaves of each row; all float32 [R] unless said.

    Attributes:
      draft_top, draft_sum: largest draft logit, and sum of exp(logit - largest).
      draft_argmax: int32, index of the largest draft logit (lowest among equals).
      target_top, target_sum, target_argmax: the same of the target logits (index in the draft
        vocabulary).
      cross: sum of exp(target - target_top) * (target - draft).
      mean: sum of exp(target - target_top) * target.
      label_logit: draft logit at target_argmax.
    """

    draft_top: Float[Array, "R"]
    draft_sum: Float[Array, "R"]
    draft_argmax: Int[Array, "R"]
    target_top: Float[Array, "R"]
    target_sum: Float[Array, "R"]
    target_argmax: Int[Array, "R"]
    cross: Float[Array, "R"]
    mean: Float[Array, "R"]
    label_logit: Float[Array, "R"]

    @property
    def draft_lse(self) -> Float[Array, "R"]:
        return self.draft_top + jnp.log(self.draft_sum)

    @property
    def target_lse(self) -> Float[Array, "R"]:
        return self.target_top + jnp.log(self.target_sum)


class Factors(NamedTuple):
    """Row factors a, b, c of the derivative (see the module)."""

    towards_target: Float[Array, "R"]
    towards_label: Float[Array, "R"]
    acceptance: Float[Array, "R"]


def row_losses(loss: str, stats: Statistics, acceptance: Float[Array, "R"]) -> Float[Array, "R"]:
    """The loss of each row; `acceptance` is read only by losses that LOSSES marks True."""
    kl = stats.cross / stats.target_sum - (stats.target_lse - stats.draft_lse)
    if loss == "kl":
        return kl
    if loss == "soft_ce":
        return stats.draft_lse - (stats.mean - stats.cross) / stats.target_sum
    if loss == "ce":
        return stats.draft_lse - stats.label_logit
    if loss == "tv":
        return jnp.float32(1.0) - acceptance
    if loss == "nla":
        return -jnp.log(jnp.maximum(acceptance, jnp.float32(SMALLEST_ACCEPTANCE)))
    weight = jnp.exp(jnp.float32(-LK_DECAY) * acceptance)
    return weight * kl + (jnp.float32(1.0) - weight) * (jnp.float32(1.0) - acceptance)


def factors(loss: str, acceptance: Float[Array, "R"], weights: Float[Array, "R"]) -> Factors:
    """The derivative's row factors, times the row weights."""
    none = jnp.zeros_like(weights)
    if loss in ("kl", "soft_ce"):
        return Factors(towards_target=weights, towards_label=none, acceptance=none)
    if loss == "ce":
        return Factors(towards_target=none, towards_label=weights, acceptance=none)
    if loss == "tv":
        return Factors(towards_target=none, towards_label=none, acceptance=-weights)
    if loss == "nla":
        inside = acceptance > jnp.float32(SMALLEST_ACCEPTANCE)
        slope = jnp.where(inside, -weights / jnp.where(inside, acceptance, 1.0), 0.0)
        return Factors(towards_target=none, towards_label=none, acceptance=slope)
    weight = jnp.exp(jnp.float32(-LK_DECAY) * acceptance)
    return Factors(
        towards_target=weights * weight,
        towards_label=none,
        acceptance=-weights * (jnp.float32(1.0) - weight),
    )


# --- blocks of rows x columns -------------------------------------------------------------------


def no_statistics(rows: int) -> Statistics:
    """Statistics of rows of which no column has been seen."""
    lowest = jnp.full((rows,), -jnp.inf, jnp.float32)
    zero, first = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32)
    return Statistics(
        draft_top=lowest,
        draft_sum=zero,
        draft_argmax=first,
        target_top=lowest,
        target_sum=zero,
        target_argmax=first,
        cross=zero,
        mean=zero,
        label_logit=zero,
    )


def merge_block(
    stats: Statistics,
    draft: Float[Array, "R C"],
    target: Float[Array, "R C"],
    columns: Int[Array, "C"],
    fresh: Bool[Array, "#R C"],
) -> Statistics:
    """Statistics after the columns that are `fresh` (at least one is); the rest does not count.

    Columns come in rising order, so that the lowest of equal logits wins.
    """
    none = jnp.iinfo(jnp.int32).max
    draft_seen = jnp.where(fresh, draft, -jnp.inf)
    target_seen = jnp.where(fresh, target, -jnp.inf)
    draft_high, target_high = jnp.max(draft_seen, axis=1), jnp.max(target_seen, axis=1)
    # The index as a minimum over a mask: an argmax is slow on CPUs and not to be had in kernels.
    draft_best = jnp.min(
        jnp.where(draft_seen == draft_high[:, None], columns[None, :], none), axis=1
    )
    target_best = jnp.min(
        jnp.where(target_seen == target_high[:, None], columns[None, :], none), axis=1
    )
    label = jnp.sum(jnp.where(columns[None, :] == target_best[:, None], draft, 0.0), axis=1)
    draft_top = jnp.maximum(stats.draft_top, draft_high)
    target_top = jnp.maximum(stats.target_top, target_high)
    draft_weight = jnp.exp(draft_seen - draft_top[:, None])
    target_weight = jnp.exp(target_seen - target_top[:, None])
    draft_fade = jnp.exp(stats.draft_top - draft_top)
    fade = jnp.exp(stats.target_top - target_top)
    gap, level = jnp.where(fresh, target - draft, 0.0), jnp.where(fresh, target, 0.0)
    higher = target_high > stats.target_top
    return Statistics(
        draft_top=draft_top,
        draft_sum=stats.draft_sum * draft_fade + jnp.sum(draft_weight, axis=1),
        draft_argmax=jnp.where(draft_high > stats.draft_top, draft_best, stats.draft_argmax),
        target_top=target_top,
        target_sum=stats.target_sum * fade + jnp.sum(target_weight, axis=1),
        target_argmax=jnp.where(higher, target_best, stats.target_argmax),
        cross=stats.cross * fade + jnp.sum(target_weight * gap, axis=1),
        mean=stats.mean * fade + jnp.sum(target_weight * level, axis=1),
        label_logit=jnp.where(higher, label, stats.label_logit),
    )


def merge_parts(parts: Statistics) -> Statistics:
    """Statistics [P, R] of P parts of the vocabulary, in rising order -> [R]."""
    draft_part = jnp.argmax(parts.draft_top, axis=0)[None]
    target_part = jnp.argmax(parts.target_top, axis=0)[None]

    def pick(values, part):
        return jnp.take_along_axis(values, part, axis=0)[0]

    draft_top, target_top = pick(parts.draft_top, draft_part), pick(parts.target_top, target_part)
    draft_fade = jnp.exp(parts.draft_top - draft_top[None])
    fade = jnp.exp(parts.target_top - target_top[None])
    return Statistics(
        draft_top=draft_top,
        draft_sum=jnp.sum(parts.draft_sum * draft_fade, axis=0),
        draft_argmax=pick(parts.draft_argmax, draft_part),
        target_top=target_top,
        target_sum=jnp.sum(parts.target_sum * fade, axis=0),
        target_argmax=pick(parts.target_argmax, target_part),
        cross=jnp.sum(parts.cross * fade, axis=0),
        mean=jnp.sum(parts.mean * fade, axis=0),
        label_logit=pick(parts.label_logit, target_part),
    )


def probabilities(
    draft_lse: Float[Array, "R"],
    target_lse: Float[Array, "R"],
    draft: Float[Array, "R C"],
    target: Float[Array, "R C"],
    fresh: Bool[Array, "#R C"],
) -> tuple[Float[Array, "R C"], Float[Array, "R C"]]:
    """q and p, zero in columns that are not fresh."""
    q = jnp.exp(draft - draft_lse[:, None])
    p = jnp.exp(target - target_lse[:, None])
    return jnp.where(fresh, q, 0.0), jnp.where(fresh, p, 0.0)


def logit_derivative(
    row_factors: Factors,
    below: Float[Array, "R"],
    q: Float[Array, "R C"],
    p: Float[Array, "R C"],
    label: Bool[Array, "R C"],
) -> Float[Array, "R C"]:
    """dz of the module's formula; q, p and label are zero in columns that do not count."""
    dz = row_factors.towards_target[:, None] * (q - p)
    dz += row_factors.towards_label[:, None] * (q - label.astype(jnp.float32))
    overlap = (q < p).astype(jnp.float32) - below[:, None]
    return dz + row_factors.acceptance[:, None] * q * overlap
