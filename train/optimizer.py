"""AdamW with clipping, warm-up and decay, as an optax transformation of named parameters."""

import dataclasses
import math
from typing import Literal

import jax
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates.

    Attributes:
        learning_rate: at the peak.
        schedule: how it falls after warm-up, over all steps.
        warmup_ratio: share of all steps in which it rises from zero.
        final_ratio: share of the peak that is left at the last step.
        clip: largest global norm of the gradient; 0 does not clip.
        weight_decay: of matrices; vectors (norms, the mask row, mask_hidden) never decay.
    """

    learning_rate: float = 1e-4
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_ratio: float = 0.0025
    final_ratio: float = 0.0
    clip: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8

    def __post_init__(self):
        if self.schedule not in ("linear", "cosine", "constant"):
            raise ValueError(f"schedule is {self.schedule!r}; choose linear, cosine or constant.")
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio is {self.warmup_ratio}; at least 0 and below 1.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 0 and below 1.")
        for name in ("clip", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; a number from 0 on is needed.")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; a number above 0 is needed.")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio is {self.final_ratio}; from 0 to 1.")


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by step number, counted from 0."""
    warmup = round(config.warmup_ratio * total_steps)
    peak, last = config.learning_rate, config.learning_rate * config.final_ratio
    steps = max(1, total_steps - warmup)
    falls = {
        "linear": lambda: optax.linear_schedule(peak, last, steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, steps, config.final_ratio),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if not warmup:
        return falls
    # The first step already moves: step 0 has 1 / warmup of the peak.
    rises = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rises, falls], [warmup])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """The transformation; its state lives on the devices of the parameters it is made for."""
    parts = [] if config.clip == 0 else [optax.clip_by_global_norm(config.clip)]
    parts.append(
        optax.adamw(
            learning_rate(config, total_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        )
    )
    return optax.chain(*parts)
