"""The losses as functions of per-row statistics, and their derivative by the draft logits.

With q = softmax(draft logits), p = softmax(target logits), both over the draft vocabulary, and
acceptance = sum_v min(p_v, q_v), every loss here has, row by row, a derivative of the form

    d loss / d z_v = a (q_v - p_v) + b (q_v - [v = label]) + c q_v ([q_v < p_v] - below)

where below = sum_v q_v [q_v < p_v] and c multiplies d acceptance / d z_v. So one pass over the logits
serves them all; only the three row factors differ.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
