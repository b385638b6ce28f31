"""Target checkpoints against their `expected.safetensors` (tests/data/targets/README.md)."""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from peagle_jax.checkpoints.load import load_target
from peagle_jax.models.cache import init_cache
from peagle_jax.models.moe import router_logits
from peagle_jax.models.primitives import norm
from peagle_jax.models.target import Target
from tests.golden.report import Case

LOGIT_LIMIT = 1e-3
HIDDEN_LIMIT = 1e-4  # of the largest |hidden|
CONFIG_FILES = ("config.json", "config_hub.json")


def check_folders(folders: Iterable[str]) -> Iterator[Case]:
    """Each folder under each of its config files; a folder that cannot be read is a failed case."""
    for folder in map(Path, folders):
        present = [name for name in CONFIG_FILES if (folder / name).is_file()]
        for config_file in present or CONFIG_FILES[:1]:
            try:
                yield check_folder(folder, config_file)
            except Exception as problem:
                what = f"{type(problem).__name__}: {problem}"
                yield Case(name=f"{folder.name} {config_file}", errors={}, problem=what)


def check_folder(folder: Path, config_file: str, *, keep_packed: bool = False) -> Case:
    """Full pass, cached decoding and routers of one checkpoint, in float32."""
    expected = _read_expected(folder / "expected.safetensors")
    target = load_target(
        folder, config_file=config_file, dtype=jnp.float32, keep_packed=keep_packed
    )
    graph, state = nnx.split(target)
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    full = jax.device_get(_full_pass(graph, state, tokens))
    largest_hidden = np.abs(expected["hidden_states"]).max()
    largest_final = np.abs(expected["final_hidden"]).max()
    errors = {
        "logits": (_worst(full["logits"], expected["logits"]), LOGIT_LIMIT),
        "hidden": (
            _worst(full["hidden_states"], expected["hidden_states"]) / largest_hidden,
            HIDDEN_LIMIT,
        ),
        "final": (
            _worst(full["final_hidden"], expected["final_hidden"]) / largest_final,
            HIDDEN_LIMIT,
        ),
    }
    if "router_logits" in expected:
        found = np.stack(full["router_logits"])
        errors["router"] = (_worst(found, expected["router_logits"]), LOGIT_LIMIT)
    decoded = _decode(graph, state, target.config, tokens)
    errors["decode"] = (_worst(decoded, expected["decode_logits"]), LOGIT_LIMIT)
    return Case(name=f"{folder.name} {config_file}", errors=errors)


def _read_expected(file: Path) -> dict[str, np.ndarray]:
    """The arrays that are compared; those for information only (bfloat16) are left alone."""
    needed = ("input_ids", "logits", "hidden_states", "final_hidden", "decode_logits")
    with safe_open(file, framework="numpy") as opened:
        names = set(opened.keys())
        missing = [name for name in needed if name not in names]
        if missing:
            raise ValueError(f"{file}: arrays {missing} are missing")
        return {
            name: opened.get_tensor(name) for name in (*needed, "router_logits") if name in names
        }


@functools.partial(jax.jit, static_argnums=0)
def _full_pass(graph: nnx.GraphDef, state: nnx.State, tokens: jax.Array) -> dict:
    target: Target = nnx.merge(graph, state)
    layers = len(target.layers)
    positions = _positions(tokens, 0)
    out = target(tokens, positions, taps=tuple(range(layers + 1)))
    stream = jnp.stack(jnp.split(out.taps, layers + 1, axis=-1))
    routers = [
        _router_scores(layer, stream[index], positions)
        for index, layer in enumerate(target.layers)
        if layer.layer.moe is not None
    ]
    return {
        "logits": target.logits(out.hidden),
        "hidden_states": stream,
        "final_hidden": out.hidden,
        "router_logits": routers,
    }


def _router_scores(layer: nnx.Module, x: jax.Array, positions: jax.Array) -> jax.Array:
    """What a layer's router says, recomputed from the layer's input with the layer's own pieces."""
    from peagle_jax.models.layers import attention_block

    added, _ = attention_block(layer, norm(x, layer.attention_norm, layer.options), positions, None)
    rows = norm(x + added, layer.mlp_norm, layer.options)
    return router_logits(layer, rows.reshape(-1, rows.shape[-1])).reshape(*rows.shape[:2], -1)


@functools.partial(jax.jit, static_argnums=0)
def _cached_pass(graph, state, tokens, start, cache):
    target: Target = nnx.merge(graph, state)
    out = target(tokens, _positions(tokens, start), cache)
    return target.logits(out.hidden), out.cache


def _decode(graph, state, config, tokens: jax.Array) -> np.ndarray:
    """All but four tokens in one call, then four calls of one, as the reference did."""
    batch, length = tokens.shape
    first = length - 4
    cache = init_cache(
        config.layers,
        batch_size=batch,
        num_slots=length,
        max_new_rows=first,
        dtype=jnp.float32,
    )
    pieces = []
    for start, end in [(0, first)] + [(at, at + 1) for at in range(first, length)]:
        logits, cache = _cached_pass(graph, state, tokens[:, start:end], jnp.int32(start), cache)
        pieces.append(np.asarray(logits))
    return np.concatenate(pieces, axis=1)


def _positions(tokens: jax.Array, start) -> jax.Array:
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32) + start
    return jnp.broadcast_to(rows[None, :], tokens.shape)


def _worst(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"found shape {found.shape}, expected {expected.shape}")
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max())
