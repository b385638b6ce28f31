"""The target language model of any family: embedding, decoder layers, final norm, head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from peagle_jax.models.cache import KVCache
from peagle_jax.models.config import TargetConfig
from peagle_jax.models.layers import DecoderLayer, LayerOptions
from peagle_jax.models.parameters import (
    Source,
    abstract_source,
    matrix,
    random_source,
    scoped,
    weight,
)
from peagle_jax.models.primitives import norm
from peagle_jax.models.products import OutputMajor, product
from peagle_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """What one pass gives.

    hidden: [B, T, H] after the final norm, the head's input. taps: [B, T, A * H], the residual
    stream entering each tapped layer, side by side in the order asked for; None when none was asked
    for. cache: with the new rows written; None when none was given. In a mapped tree the fields are
    what stands for the arrays (shapes, shardings), hence no types.
    """

    hidden: Any
    taps: Any
    cache: KVCache | None


class Target(nnx.Module):
    """Parameters of a target model; calling it is a pure function of tokens, positions and cache.

    `source` gives each parameter by name (see parameters.Source); by default shapes alone.
    `dtype` is the dtype of parameters and of the computation; logits are float32 always.
    """

    def __init__(
        self, config: TargetConfig, *, dtype: Any = jnp.float32, source: Source = abstract_source
    ):
        self.config, self.dtype = config, jnp.dtype(dtype)
        make = scoped(source, "")
        self.embedding = make("embedding", config.vocab_size, config.hidden_size, dtype=dtype)
        options = LayerOptions.of(config)
        self.layers = nnx.List(
            DecoderLayer(layer, options, source, f"layers.{index}.", dtype)
            for index, layer in enumerate(config.layers)
        )
        self.norm = make("norm", config.hidden_size, dtype=dtype)
        if not config.tied_embeddings:
            self.head = make("head", config.hidden_size, config.vocab_size, dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None = None,
        *,
        taps: tuple[int, ...] = (),
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> TargetOutput:
        """Run the layers on new rows.

        positions: absolute position of each row, -1 for padding rows, which write nothing and give
        finite output. cache: None attends among the T rows alone; else rows are written first and
        attention runs over the cache. taps: layers whose input is wanted, convention T (0 the
        embedding output, num_layers the last layer's output before the final norm).

        Raises ValueError for a tap outside 0..num_layers or a cache of another depth.
        """
        layers = len(self.layers)
        if any(not 0 <= tap <= layers for tap in taps):
            raise ValueError(f"taps {taps} must lie in 0..{layers} (convention T, {layers} layers)")
        if cache is not None and len(cache.layers) != layers:
            raise ValueError(f"the cache has {len(cache.layers)} layers, the model {layers}")
        x = constrain(self.embed(jnp.where(positions >= 0, tokens, 0)), "batch", "sequence")
        stream, caches = [x], []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            x, layer_cache = layer(x, positions, layer_cache, segment_ids=segment_ids)
            x = constrain(x, "batch", "sequence")
            stream.append(x)
            caches.append(layer_cache)
        return TargetOutput(
            hidden=norm(x, self.norm, self.config),
            taps=jnp.concatenate([stream[tap] for tap in taps], axis=-1) if taps else None,
            cache=None if cache is None else KVCache(tuple(caches)),
        )

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows H"]:
        """Embeddings as they enter layer 0; an id outside the vocabulary gives NaN.

        A scale is rounded to the compute dtype first, as the public implementations do.
        """
        table = weight(self.embedding, self.dtype)
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return x

    def logits(self, hidden: Float[Array, "*rows H"]) -> Float32[Array, "*rows V"]:
        """Next-token logits of final hidden states, after the soft cap; chosen rows only."""
        hidden = hidden.astype(self.dtype)
        if self.config.tied_embeddings:
            # The table is stored [out, in] already.
            table = weight(self.embedding, self.dtype)
            head = OutputMajor(table, table.shape[::-1])
        else:
            head = matrix(self.head, self.dtype)
        out = product(hidden, head, 1, dtype=jnp.float32)
        cap = self.config.final_soft_cap
        return out if cap is None else jnp.float32(cap) * jnp.tanh(out / jnp.float32(cap))


def init_target(config: TargetConfig, key: jax.Array, dtype: Any = jnp.float32) -> Target:
    """A target with random parameters in which every norm, bias, sink and scalar counts."""
    return Target(config, dtype=dtype, source=random_source(key))
