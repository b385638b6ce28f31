"""The decoder layer that every family and the drafter share, and the functions it is made of.

What differs between families is data (`LayerOptions`). Weights keep heads apart: a key head, the
query heads that share it, and its value lie side by side, so that cutting the key-head axis for
tensor parallelism cuts whole groups.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from peagle_jax.models.attention import attention
from peagle_jax.models.cache import LayerCache
from peagle_jax.models.config import Activation, LayerConfig, NormCast, TargetConfig
from peagle_jax.models.moe import add_moe_parameters, moe
from peagle_jax.models.parameters import Source, matrix, scoped, weight
from peagle_jax.models.primitives import activate, norm, rms_norm
from peagle_jax.models.products import product
from peagle_jax.models.rope import rotate, rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What the layers of one model have in common; fields as in TargetConfig.

    `input_size` is what qkv reads (a drafter's first layer reads twice the hidden size).
    """

    hidden_size: int
    input_size: int
    intermediate_size: int
    norm_eps: float
    norm_cast: NormCast = "before_weight"
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    post_norms: bool = False
    layer_scalar: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    @classmethod
    def of(cls, config: TargetConfig) -> "LayerOptions":
        names = {f.name for f in dataclasses.fields(cls)} - {"input_size"}
        shared = {name: getattr(config, name) for name in names}
        return cls(input_size=config.hidden_size, **shared)


class DecoderLayer(nnx.Module):
    """Attention and MLP with their norms and residuals."""

    def __init__(
        self,
        layer: LayerConfig,
        options: LayerOptions,
        source: Source,
        prefix: str,
        dtype: Any,
    ):
        self.layer, self.options = layer, options
        make = scoped(source, prefix)
        hidden = options.hidden_size
        self.attention_norm = make("attention_norm", hidden, dtype=dtype)
        add_attention_parameters(self, layer, options, source, prefix, dtype)
        self.mlp_norm = make("mlp_norm", hidden, dtype=dtype)
        add_mlp_parameters(self, layer, options, source, prefix, dtype)
        if options.post_norms:
            self.attention_post_norm = make("attention_post_norm", hidden, dtype=dtype)
            self.mlp_post_norm = make("mlp_post_norm", hidden, dtype=dtype)
        if options.layer_scalar:
            self.layer_scalar = make("layer_scalar", dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        cache: LayerCache | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T H"], LayerCache | None]:
        """The residual stream after this layer, and the layer's cache with the new rows."""
        options = self.options
        added, cache = attention_block(
            self, norm(x, self.attention_norm, options), positions, cache, segment_ids=segment_ids
        )
        if options.post_norms:
            added = norm(added, self.attention_post_norm, options)
        x = x + added
        added = mlp_block(self, norm(x, self.mlp_norm, options), positions)
        if options.post_norms:
            added = norm(added, self.mlp_post_norm, options)
        x = x + added
        if options.layer_scalar:
            x = x * weight(self.layer_scalar, x.dtype)
        return x, cache


def add_attention_parameters(
    module: nnx.Module,
    layer: LayerConfig,
    options: LayerOptions,
    source: Source,
    prefix: str,
    dtype: Any,
) -> None:
    """Set what `attention_block` reads: qkv, o, and where configured biases, sinks and norms."""
    make = scoped(source, prefix)
    heads, group, size = layer.num_kv_heads, layer.group_size, layer.head_dim
    if group * heads != layer.num_heads:
        raise ValueError(f"{layer.num_heads} query heads cannot share {heads} key/value heads")
    slots = group + (1 if layer.value_from_key else 2)
    module.qkv = make("qkv", options.input_size, heads, slots, size, dtype=dtype)
    module.o = make("o", heads, group, size, options.hidden_size, dtype=dtype)
    if options.attention_bias:
        module.qkv_bias = make("qkv_bias", heads, slots, size, dtype=dtype)
        module.o_bias = make("o_bias", options.hidden_size, dtype=dtype)
    if options.attention_sinks:
        module.sinks = make("sinks", heads, group, dtype=dtype)
    if options.qk_norm:
        module.q_norm = make("q_norm", size, dtype=dtype)
        module.k_norm = make("k_norm", size, dtype=dtype)


def add_mlp_parameters(
    module: nnx.Module,
    layer: LayerConfig,
    options: LayerOptions,
    source: Source,
    prefix: str,
    dtype: Any,
) -> None:
    """Set what `mlp_block` reads: a dense gate/up and down, or routed experts."""
    hidden, inner = options.hidden_size, options.intermediate_size
    if layer.moe is not None:
        add_moe_parameters(module, layer.moe, hidden, source, prefix, dtype)
        return
    make = scoped(source, prefix)
    module.gate_up = make("gate_up", hidden, 2, inner, dtype=dtype)
    module.down = make("down", inner, hidden, dtype=dtype)
    if options.mlp_bias:
        module.gate_up_bias = make("gate_up_bias", 2, inner, dtype=dtype)
        module.down_bias = make("down_bias", hidden, dtype=dtype)


def attention_block(
    module: nnx.Module,
    x: Float[Array, "B T input"],
    positions: Int[Array, "B T"],
    cache: LayerCache | None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H"], LayerCache | None]:
    """Projections, norms, rotation, attention and output projection of normed rows `x`."""
    layer, options = module.layer, module.options
    query, key, value = attention_inputs(module, x, positions)
    out, cache = attention(
        query,
        key,
        value,
        positions,
        cache,
        scale=attention_scale(module),
        window=layer.window,
        sinks=weight(module.sinks, jnp.float32) if options.attention_sinks else None,
        segment_ids=segment_ids,
    )
    return attention_output(module, out), cache


def attention_inputs(
    module: nnx.Module, x: Float[Array, "B T input"], positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T KV G D"], Float[Array, "B T KV D"], Float[Array, "B T KV D"]]:
    """Queries and keys, normed and rotated, and values of normed rows `x`."""
    layer, options, dtype = module.layer, module.options, x.dtype
    group = layer.group_size
    mixed = product(x, matrix(module.qkv, dtype), 1)
    if options.attention_bias:
        mixed = mixed + weight(module.qkv_bias, dtype)[None, None]
    query, key = mixed[..., :group, :], mixed[..., group, :]
    value = key if layer.value_from_key else mixed[..., group + 1, :]
    if options.qk_norm:
        query, key = norm(query, module.q_norm, options), norm(key, module.k_norm, options)
    if options.value_norm:
        value = rms_norm(value, None, options.norm_eps, options.norm_cast)
    cos, sin = rotation(positions, layer.rope, layer.head_dim)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def attention_scale(module: nnx.Module) -> float:
    """The factor on the attention scores of a layer."""
    scale = module.options.attention_scale
    return module.layer.head_dim**-0.5 if scale is None else scale


def attention_output(
    module: nnx.Module, attended: Float[Array, "B T KV G D"]
) -> Float[Array, "B T H"]:
    """The output projection of what the heads read."""
    out = product(attended, matrix(module.o, attended.dtype), 3)
    if module.options.attention_bias:
        out = out + weight(module.o_bias, attended.dtype)[None, None]
    return out


def mlp_block(
    module: nnx.Module, x: Float[Array, "B T H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T H"]:
    """The dense MLP, or the routed experts, of normed rows `x`; padding rows stay finite."""
    options, dtype = module.options, x.dtype
    if module.layer.moe is not None:
        return moe(module, x, positions >= 0)
    gate_up = product(x, matrix(module.gate_up, dtype), 1)
    if options.mlp_bias:
        gate_up = gate_up + weight(module.gate_up_bias, dtype)[None, None]
    inner = activate(gate_up[..., 0, :], gate_up[..., 1, :], options)
    out = product(inner, matrix(module.down, dtype), 1)
    if options.mlp_bias:
        out = out + weight(module.down_bias, dtype)[None, None]
    return out
