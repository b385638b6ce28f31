"""The drafter: a small decoder over fused target states, for P-EAGLE (one pass) and EAGLE-3 alike.

A row pairs a token with the target's hidden state of the position before it. P-EAGLE (arXiv
2602.01469) also feeds mask rows, whose token is the mask token and whose hidden state is one
learned vector, so that K tokens come out of one pass. EAGLE-3 (arXiv 2503.01840) feeds the
drafter's own hidden state back instead, one pass per token. The network is the same; which rows
are fed is decided in decoding, which are trained in train.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from peagle_jax.models.cache import KVCache, LayerCache
from peagle_jax.models.config import DrafterConfig, LayerConfig
from peagle_jax.models.layers import (
    DecoderLayer,
    LayerOptions,
    add_attention_parameters,
    add_mlp_parameters,
    attention_block,
    mlp_block,
)
from peagle_jax.models.parameters import (
    Source,
    abstract_source,
    matrix,
    random_source,
    scoped,
    weight,
)
from peagle_jax.models.primitives import norm, rms_norm
from peagle_jax.models.products import product

_NORM_CAST = "before_weight"  # as the llama and qwen3 families


class DraftIds(nnx.Variable):
    """Integer data beside the parameters; not an nnx.Param, so that gradients leave it alone."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterOutput:
    """What one pass gives.

    hidden: after the final norm, the head's input. feedback: what the next EAGLE-3 pass is fed as
    its fused hidden state (before the final norm, or after it with `norm_output`). cache: with the
    new rows written; None when none was given.
    """

    hidden: Float[Array, "B T H"]
    feedback: Float[Array, "B T H"]
    cache: KVCache | None


class FirstLayer(nnx.Module):
    """The layer that reads [embedding; fused hidden state], each with a norm of its own."""

    def __init__(
        self,
        layer: LayerConfig,
        options: LayerOptions,
        norm_before_residual: bool,
        source: Source,
        prefix: str,
        dtype: Any,
    ):
        self.layer, self.options = layer, options
        self.norm_before_residual = norm_before_residual
        make, hidden = scoped(source, prefix), options.hidden_size
        self.embedding_norm = make("embedding_norm", hidden, dtype=dtype)
        self.hidden_norm = make("hidden_norm", hidden, dtype=dtype)
        add_attention_parameters(self, layer, options, source, prefix, dtype)
        self.mlp_norm = make("mlp_norm", hidden, dtype=dtype)
        add_mlp_parameters(self, layer, options, source, prefix, dtype)

    def inputs(
        self, embedded: Float[Array, "B T H"], fused: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H"]]:
        """What attention reads, embedding first, and the residual that its output is added to."""
        normed = norm(fused, self.hidden_norm, self.options)
        read = jnp.concatenate([norm(embedded, self.embedding_norm, self.options), normed], -1)
        return read, normed if self.norm_before_residual else fused

    def __call__(
        self,
        embedded: Float[Array, "B T H"],
        fused: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        cache: LayerCache | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T H"], LayerCache | None]:
        """The residual stream after this layer, and the layer's cache with the new rows."""
        read, residual = self.inputs(embedded, fused)
        added, cache = attention_block(self, read, positions, cache, segment_ids=segment_ids)
        x = residual + added
        return x + mlp_block(self, norm(x, self.mlp_norm, self.options), positions), cache


class Drafter(nnx.Module):
    """Parameters of a drafter; calling it is a pure function of rows, positions and cache.

    `source` gives each parameter by name (see parameters.Source); by default shapes alone. The
    offsets `d2t` are asked for as int32, all zero where draft ids are target ids. `dtype` is the
    dtype of parameters and of the computation; logits are float32 always.

    Raises ValueError where the config contradicts itself.
    """

    def __init__(
        self, config: DrafterConfig, *, dtype: Any = jnp.float32, source: Source = abstract_source
    ):
        _check(config)
        self.config, self.dtype = config, jnp.dtype(dtype)
        make, hidden, width = scoped(source, ""), config.hidden_size, config.input_size
        options = _layer_options(config)
        self.embedding = make("embedding", config.vocab_size, hidden, dtype=dtype)
        if config.norm_before_fc:
            self.input_norm = make("input_norm", width, dtype=dtype)
        if config.fc_norm:
            taps = width // config.target_hidden_size
            self.fc_norms = make("fc_norms", taps, config.target_hidden_size, dtype=dtype)
        if config.fuse:
            self.fc = make("fc", width, hidden, dtype=dtype)
        if config.parallel_drafting:
            self.mask_hidden = make("mask_hidden", width, dtype=dtype)
        first = dataclasses.replace(options, input_size=2 * hidden)
        self.layers = nnx.List(
            FirstLayer(layer, first, config.norm_before_residual, source, "layers.0.", dtype)
            if index == 0
            else DecoderLayer(layer, options, source, f"layers.{index}.", dtype)
            for index, layer in enumerate(config.layers)
        )
        self.norm = make("norm", hidden, dtype=dtype)
        self.head = make("head", hidden, config.draft_vocab_size, dtype=dtype)
        self.d2t = DraftIds(source("d2t", (config.draft_vocab_size,), jnp.int32))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        fused: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        cache: KVCache | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> DrafterOutput:
        """Run the layers on new rows.

        tokens, fused: row by row the token and the hidden state it is paired with, which is
        `fuse` of the target's taps, `fused_mask`, or the `feedback` of an earlier pass.
        positions: absolute position of each row's hidden state, -1 for padding rows, which write
        nothing and give finite output. cache: None attends among the T rows alone.

        Raises ValueError for a cache of another depth.
        """
        layers = len(self.layers)
        if cache is not None and len(cache.layers) != layers:
            raise ValueError(f"the cache has {len(cache.layers)} layers, the drafter {layers}")
        real = positions >= 0
        embedded = self.embed(jnp.where(real, tokens, 0))
        fused = fused.astype(self.dtype)
        x = jnp.where(real[:, :, None], fused, jnp.zeros((), self.dtype))
        caches = []
        for index, layer in enumerate(self.layers):
            rows = (embedded, x) if index == 0 else (x,)
            layer_cache = None if cache is None else cache.layers[index]
            x, layer_cache = layer(*rows, positions, layer_cache, segment_ids=segment_ids)
            caches.append(layer_cache)
        hidden = self.finish(x)
        return DrafterOutput(
            hidden=hidden,
            feedback=hidden if self.config.norm_output else x,
            cache=None if cache is None else KVCache(tuple(caches)),
        )

    def fuse(self, taps: Float[Array, "*rows AHt"]) -> Float[Array, "*rows H"]:
        """Tapped target states, side by side in ascending order, to the drafter's width."""
        config, x = self.config, taps.astype(self.dtype)
        if config.norm_before_fc:
            x = norm(x, self.input_norm, _layer_options(config))
        if config.fc_norm:
            scales = weight(self.fc_norms, jnp.float32)
            parts = jnp.split(x, scales.shape[0], axis=-1)
            parts = [
                rms_norm(part, scales[i], config.norm_eps, _NORM_CAST)
                for i, part in enumerate(parts)
            ]
            x = jnp.concatenate(parts, axis=-1)
        return product(x, matrix(self.fc, self.dtype), 1) if config.fuse else x

    def fused_mask(self) -> Float[Array, " H"]:
        """The hidden state of every mask row: the learned vector on the same way as real states.

        Raises ValueError for a head that was not trained for parallel drafting.
        """
        if not self.config.parallel_drafting:
            raise ValueError(
                "this drafter has no mask_hidden: it was not trained for parallel drafting; "
                "draft with method eagle3"
            )
        return self.fuse(weight(self.mask_hidden, self.dtype))

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows H"]:
        """Embeddings of tokens; an id outside the vocabulary gives NaN, not a neighbour's row."""
        table = weight(self.embedding, self.dtype)
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return x

    def finish(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """The final norm: residual stream to the head's input."""
        return norm(x, self.norm, _layer_options(self.config))

    def logits(self, hidden: Float[Array, "*rows H"]) -> Float32[Array, "*rows Vd"]:
        """Draft logits of `hidden`; -inf where a padded draft id stands for no target id."""
        hidden = hidden.astype(self.dtype)
        out = product(hidden, matrix(self.head, self.dtype), 1, dtype=jnp.float32)
        limit = self.config.target_vocab_size
        if limit is None:
            return out
        known = jnp.expand_dims(self.kept_ids() < limit, tuple(range(out.ndim - 1)))
        return jnp.where(known, out, -jnp.inf)

    def kept_ids(self) -> Int[Array, " Vd"]:
        """The target id of each draft id: i + d2t[i]."""
        offsets = self.d2t.get_value()
        return jnp.arange(offsets.shape[0], dtype=offsets.dtype) + offsets

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Target ids of draft ids; -1 for an id outside the draft vocabulary."""
        return (
            self.kept_ids()
            .at[draft_ids]
            .get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        )

    def target_logits(self, logits: Float32[Array, "*rows Vd"]) -> Float32[Array, "*rows V"]:
        """Draft logits placed at their target ids; -inf for the ids that are never drafted."""
        size = self.config.target_vocab_size or self.config.vocab_size
        empty = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
        ids = self.kept_ids()
        # A padded draft id lies past the end and drops; none is negative, which would wrap.
        return empty.at[..., ids].set(logits, mode="drop")


def init_drafter(config: DrafterConfig, key: jax.Array, dtype: Any = jnp.float32) -> Drafter:
    """A drafter with random parameters in which every norm and bias counts.

    A draft vocabulary smaller than the target's is a random subset of it, in ascending order.
    """
    values, size = random_source(key), config.draft_vocab_size

    def source(name: str, shape: tuple[int, ...], kind: Any) -> Array:
        if name != "d2t":
            return values(name, shape, kind)
        if size >= config.vocab_size:
            return jnp.zeros(shape, jnp.int32)
        chosen = jax.random.permutation(jax.random.fold_in(key, 0), config.vocab_size)[:size]
        return jnp.sort(chosen).astype(jnp.int32) - jnp.arange(size, dtype=jnp.int32)

    return Drafter(config, dtype=dtype, source=source)


def check_num_speculative_tokens(config: DrafterConfig, num_speculative_tokens: int) -> None:
    """Refuse to draft more tokens in one pass than the narrowest draft window keeps in sight.

    In training the mask rows of one rollout see each other whatever the window; at serving the
    window holds for every key. The two agree as long as a rollout fits into the window.
    """
    windows = [layer.window for layer in config.layers if layer.window is not None]
    if config.parallel_drafting and windows and num_speculative_tokens > min(windows):
        raise ValueError(
            f"num_speculative_tokens is {num_speculative_tokens}, but a draft layer attends over "
            f"a window of {min(windows)} positions only, so the mask rows would lose sight of each "
            f"other, unlike in training; draft at most {min(windows)}"
        )


def _layer_options(config: DrafterConfig) -> LayerOptions:
    return LayerOptions(
        hidden_size=config.hidden_size,
        input_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps,
        norm_cast=_NORM_CAST,
        activation=config.activation,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.style == "qwen3",
    )


def _check(config: DrafterConfig) -> None:
    if not config.layers:
        raise ValueError("a drafter needs at least one layer, the config has none")
    if config.norm_before_fc and config.fc_norm:
        raise ValueError("norm_before_fc and fc_norm exclude each other; set one of them to false")
    if config.use_taps and not config.taps:
        raise ValueError("the config taps no target layer; set taps, or use_taps=False")
    if not config.fuse and config.input_size != config.hidden_size:
        raise ValueError(
            f"without fc the drafter's width {config.hidden_size} must be that of its input, "
            f"{config.input_size}"
        )
    if config.parallel_drafting and config.mask_token_id is None:
        raise ValueError(
            "parallel drafting needs mask_token_id; set it, or parallel_drafting=False"
        )
    mask = config.mask_token_id
    if mask is not None and not 0 <= mask < config.vocab_size:
        raise ValueError(
            f"mask_token_id {mask} is outside the drafter's vocabulary, 0..{config.vocab_size - 1}"
        )
