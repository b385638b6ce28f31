"""The drafter that training starts from: its config for a target, and its first parameters.

Embedding and head come from the target. The rest is random ("new"), taken from the target's own
last layers where the shapes allow it, or read from a trained head.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models.config import DrafterConfig, LayerConfig, TargetConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.parameters import weight
from peagle_jax.models.target import Target
from train.parameters import Params, build_drafter
from train.recipe import DrafterPart

_SMALL = 0.02


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """(2, L // 2, L - 3), convention T.

    Raises:
        ValueError: these are not three different layers; the caller must choose.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not 2 < taps[1] < taps[2]:
        raise ValueError(
            f"a target of {num_layers} layers has no default taps: {taps} are not three different "
            "layers in ascending order; set drafter.taps (capture: --taps)."
        )
    return taps


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError for taps that a target of this depth does not have, or out of order."""
    if list(taps) != sorted(set(taps)) or not all(0 <= t < num_layers for t in taps):
        raise ValueError(
            f"drafter.taps (capture: --taps) {list(taps)} must be different layers in ascending "
            f"order out of 0..{num_layers - 1} (convention T)."
        )


def drafter_config(
    target: TargetConfig,
    part: DrafterPart,
    *,
    mask_token_id: int | None,
    num_depths: int | None,
) -> DrafterConfig:
    """Config of a new drafter for `target`.

    mask_token_id: None for a head without mask rows (EAGLE-3). num_depths: depths trained.

    Raises:
        ValueError: taps that the target does not have, or that are not different and ascending.
    """
    taps = default_taps(target.num_layers) if part.taps is None else part.taps
    check_taps(taps, target.num_layers)
    first = target.layers[0]
    widest = max(target.layers, key=lambda layer: layer.window is None)
    layer = LayerConfig(
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        rope=widest.rope,
    )
    routed = any(own.moe is not None for own in target.layers)
    inner = 3 * target.hidden_size if routed else target.intermediate_size
    return DrafterConfig(
        style=part.style,
        vocab_size=target.vocab_size,
        draft_vocab_size=part.draft_vocab_size or target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=part.intermediate_size or inner,
        target_hidden_size=target.hidden_size,
        layers=(layer,) * part.num_layers,
        taps=taps,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        norm_before_residual=part.norm_before_residual,
        norm_before_fc=part.norm_before_fc,
        fc_norm=part.fc_norm,
        norm_output=part.norm_output,
        mask_token_id=mask_token_id,
        num_depths=num_depths,
        num_speculative_tokens=None if num_depths is None else min(num_depths, 5),
        parallel_drafting=mask_token_id is not None,
    )


def first_unused_id(tokenizer_size: int, vocab_size: int) -> int:
    """The first id behind the tokenizer's, to be the mask token.

    Raises:
        ValueError: the vocabulary has no row to spare.
    """
    if tokenizer_size >= vocab_size:
        raise ValueError(
            f"the tokenizer uses all {vocab_size} rows of the vocabulary; choose a token that no "
            "text uses and set drafter.mask_token_id."
        )
    return tokenizer_size


def start_parameters(
    config: DrafterConfig,
    target: Target,
    key: jax.Array,
    *,
    kept: Sequence[int] | np.ndarray | None = None,
    from_target_layers: bool = False,
) -> Params:
    """First parameters, float32, of a new drafter.

    kept: target ids of the draft vocabulary, ascending; None is all. Raises ValueError where their
    number is not the config's, or one is not in the target's vocabulary; and for more layers
    than the target has to take them from.
    """
    if from_target_layers and config.num_layers > target.config.num_layers:
        raise ValueError(
            f"drafter.num_layers is {config.num_layers}, the target has "
            f"{target.config.num_layers} layers to start from."
        )
    shapes = {name: (value.shape, value.dtype) for name, value in _shapes(config).items()}
    params: Params = {}
    for index, (name, (shape, _)) in enumerate(sorted(shapes.items())):
        last = name.rsplit(".", 1)[-1]
        if last.endswith("norm") or last == "fc_norms":
            params[name] = jnp.ones(shape, jnp.float32)
        elif last.endswith("bias"):
            params[name] = jnp.zeros(shape, jnp.float32)
        else:
            scale = 1.0 if last == "mask_hidden" else _SMALL
            noise = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
            params[name] = noise * jnp.float32(scale)
    params |= target_tables(config, target, kept)
    params["norm"] = weight(target.norm, jnp.float32)
    if from_target_layers:
        params |= _from_target(config, target, params)
    return params


def target_tables(
    config: DrafterConfig, target: Target, kept: Sequence[int] | np.ndarray | None = None
) -> Params:
    """Embedding, head and d2t of a new drafter, float32: what training may leave as it is.

    Raises ValueError as `start_parameters` does for `kept`.
    """
    if (config.draft_vocab_size != target.config.vocab_size) and kept is None:
        raise ValueError("a draft vocabulary smaller than the target's needs its ids.")
    ids = np.arange(config.draft_vocab_size) if kept is None else np.asarray(kept)
    if len(ids) != config.draft_vocab_size:
        raise ValueError(f"{len(ids)} draft ids for a vocabulary of {config.draft_vocab_size}.")
    # jnp would clamp an id that is not there to the last one.
    if len(ids) and not (0 <= ids.min() and ids.max() < target.config.vocab_size):
        raise ValueError(
            f"draft ids from {ids.min()} to {ids.max()} for a target with a vocabulary of "
            f"{target.config.vocab_size}; choose them from data prepared for this target."
        )
    embedding = weight(target.embedding, jnp.float32)
    head = embedding.T if target.config.tied_embeddings else weight(target.head, jnp.float32)
    d2t = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    return {"embedding": embedding, "head": head[:, ids], "d2t": d2t}


def parameter_shapes(config: DrafterConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of every parameter of a drafter by name, d2t included, as float32 and int32."""
    found = {
        name: jax.ShapeDtypeStruct(value.shape, jnp.float32)
        for name, value in _shapes(config).items()
    }
    return {**found, "d2t": jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32)}


def _shapes(config: DrafterConfig) -> Mapping[str, Any]:
    found: dict[str, Any] = {}

    def source(name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        found[name] = jax.ShapeDtypeStruct(shape, dtype)
        return found[name]

    Drafter(config, source=source)
    del found["d2t"]
    return found


def _from_target(config: DrafterConfig, target: Target, params: Params) -> Params:
    """Parameters of the target's last layers, where the drafter's have the same shape.

    The first layer reads [embedding, hidden]: the target's projections go to the hidden half, and
    the fusion starts as the last tap alone, so that the hidden state enters as the target left it.
    """
    taken: Params = {}
    last = target.layers[len(target.layers) - config.num_layers :]
    hidden = config.hidden_size
    for index, source in enumerate(last):
        prefix = f"layers.{index}."
        for name in ("o", "gate_up", "down", "q_norm", "k_norm", "mlp_norm", "attention_norm"):
            ours = "hidden_norm" if index == 0 and name == "attention_norm" else name
            if hasattr(source, name) and prefix + ours in params:
                value = weight(getattr(source, name), jnp.float32)
                if value.shape == params[prefix + ours].shape:
                    taken[prefix + ours] = value
        value = weight(source.qkv, jnp.float32)
        mine = params[prefix + "qkv"]
        if value.shape == mine.shape:
            taken[prefix + "qkv"] = value
        elif index == 0 and (2 * value.shape[0], *value.shape[1:]) == mine.shape:
            taken[prefix + "qkv"] = mine.at[hidden:].set(value)
    if config.fuse and config.target_hidden_size == hidden:
        taken["fc"] = params["fc"].at[-hidden:].add(jnp.eye(hidden, dtype=jnp.float32))
    return taken


def check_head(found: DrafterConfig, target: TargetConfig, part: DrafterPart) -> None:
    """Raise ValueError where a trained head does not fit the target or the recipe."""
    problems = []
    if found.target_hidden_size != target.hidden_size:
        problems.append(f"target_hidden_size {found.target_hidden_size}, not {target.hidden_size}")
    if part.draft_vocab_size not in (None, found.draft_vocab_size):
        problems.append(f"draft_vocab_size {found.draft_vocab_size}, not {part.draft_vocab_size}")
    if part.mask_token_id not in (None, found.mask_token_id):
        problems.append(f"mask_token_id {found.mask_token_id}, not {part.mask_token_id}")
    if part.taps not in (None, found.taps):
        problems.append(f"taps {found.taps}, not {part.taps}")
    if problems:
        raise ValueError(f"{part.path}: the head has {'; '.join(problems)}.")


def with_depths(config: DrafterConfig, num_depths: int) -> DrafterConfig:
    """The config of a head trained on to `num_depths`."""
    return dataclasses.replace(
        config,
        num_depths=num_depths,
        num_speculative_tokens=config.num_speculative_tokens or min(num_depths, 5),
    )


def whole_drafter(config: DrafterConfig, params: Params, dtype: Any = jnp.float32) -> Drafter:
    """A drafter around whole parameters (see `parameters.whole`), cast to `dtype`."""
    cast = {n: v if n == "d2t" else jnp.asarray(v, dtype) for n, v in params.items()}
    return build_drafter(config, cast, dtype)
