"""Small drafter configs for tests, in which every size differs from its neighbours."""

import dataclasses
from typing import Any

from peagle_jax.models.config import DrafterConfig, LayerConfig, RopeConfig


def small_drafter(
    *,
    num_layers: int = 2,
    rope: RopeConfig | None = None,
    head_dim: int = 6,
    windows: tuple[int | None, ...] | None = None,
    **changes: Any,
) -> DrafterConfig:
    """A drafter of hidden 16 for a target of hidden 12; `changes` go to DrafterConfig."""
    layer = LayerConfig(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, rope=rope or RopeConfig(theta=100.0)
    )
    windows = windows or (None,) * num_layers
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "draft_vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "target_hidden_size": 12,
        "layers": tuple(dataclasses.replace(layer, window=window) for window in windows),
        "taps": (2, 4, 5),
        "max_positions": 64,
        "mask_token_id": 31,
    }
    settings |= changes
    if not settings.get("parallel_drafting", True):
        settings["mask_token_id"] = None
    return DrafterConfig(**settings)
