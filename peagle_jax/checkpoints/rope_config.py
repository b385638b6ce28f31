"""RoPE settings from both dialects of config.json; models/rope.py holds the frequencies.

Older files hold `rope_theta` beside `rope_scaling`; transformers 5 writes `rope_parameters` with
theta inside, nested by layer type where layer kinds differ.
"""

import math
from typing import Any

from peagle_jax.checkpoints.fields import Fields
from peagle_jax.models.config import RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")

# What may stand beside each rope type; any other key could change the numbers unseen.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "proportional": ("factor", "partial_rotary_factor"),
}
_COMMON = ("rope_type", "type", "rope_theta")


def rope_config(
    config: Fields,
    layer_type: str | None = None,
    *,
    default_theta: float = 10_000.0,
    defaults: dict[str, Any] | None = None,
) -> RopeConfig:
    """The RopeConfig of one layer type.

    `config` is the object that holds `rope_parameters` or `rope_theta`/`rope_scaling`. `defaults`
    are the family's scaling settings for a file that names neither. Raises CheckpointError for an
    unknown rope type, a theta that is not positive, an unknown key, or two spellings that disagree.
    """
    scaling = _scaling(config, layer_type, defaults)
    theta = _theta(config, scaling, default_theta)
    kind = _kind(scaling)
    for key in scaling.raw:
        if key not in (*_COMMON, *_KEYS[kind]):
            neutral = {
                "factor": (1.0,),
                "partial_rotary_factor": (1.0,),
                "attention_factor": (1.0,),
            }
            scaling.only(key, neutral.get(key, ()), f"rope type {kind!r} does not use it")
    if kind != "proportional":
        config.only("partial_rotary_factor", (1.0,), f"rope type {kind!r} rotates whole heads")
    return _build(config, scaling, kind, theta)


def _scaling(config: Fields, layer_type: str | None, defaults: dict[str, Any] | None) -> Fields:
    """The object with rope_type and its settings, whichever key holds it."""
    found = [config.child(key) for key in ("rope_parameters", "rope_scaling") if config.has(key)]
    found = [_of_layer(fields, layer_type) for fields in found]
    if len(found) == 2:
        settings = [{k: v for k, v in f.raw.items() if k not in _COMMON} for f in found]
        if _kind(found[0]) != _kind(found[1]) or settings[0] != settings[1]:
            config.fail("rope_scaling", "the same settings as rope_parameters")
    if found:
        return found[0]
    return Fields(defaults or {}, config.where, f"{config.prefix}rope_parameters.")


def _of_layer(fields: Fields, layer_type: str | None) -> Fields:
    """The settings of `layer_type` where they are nested by layer type, else all of them."""
    if not any(name in fields.raw for name in LAYER_TYPES):
        return fields
    return fields.child(layer_type or "full_attention")


def _theta(config: Fields, scaling: Fields, default: float) -> float:
    inside = scaling.number("rope_theta", None)
    outside = config.number("rope_theta", None)
    if inside is not None and outside is not None and inside != outside:
        config.fail("rope_theta", f"the same value as {scaling.prefix}rope_theta ({inside})")
    return inside or outside or default


def _kind(scaling: Fields) -> str:
    kind = scaling.text("rope_type", None)
    old = scaling.text("type", None)
    if kind is not None and old is not None and kind != old:
        scaling.fail("type", f"the same value as rope_type ({kind!r})")
    if (kind or old or "default") not in _KEYS:
        scaling.fail("rope_type" if kind else "type", f"one of {', '.join(_KEYS)}")
    return kind or old or "default"


def _build(config: Fields, scaling: Fields, kind: str, theta: float) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=scaling.number("factor"))
    if kind == "proportional":
        fraction = scaling.number("partial_rotary_factor", 1.0)
        if fraction > 1.0:
            scaling.fail("partial_rotary_factor", "a number in (0, 1]")
        factor = scaling.number("factor", 1.0)
        return RopeConfig(kind="proportional", theta=theta, factor=factor, rotary_fraction=fraction)
    original = scaling.integer(
        "original_max_position_embeddings",
        config.integer(
            "original_max_position_embeddings", config.integer("max_position_embeddings", None)
        ),
    )
    if original is None:
        scaling.fail("original_max_position_embeddings", "an integer >= 1")
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            scaling.fail("low_freq_factor", f"less than high_freq_factor ({high})")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=scaling.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original,
        )
    factor = scaling.number("factor", None)
    if factor is None:
        factor = config.integer("max_position_embeddings") / original
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float | None:
    """The explicit value, the mscale ratio, or None where the usual 0.1 ln(factor) + 1 holds."""
    explicit = scaling.number("attention_factor", None)
    if explicit is not None:
        return explicit
    if not (scaling.raw.get("mscale") and scaling.raw.get("mscale_all_dim")):
        return None

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    return magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
