"""What a model is, as data: every field changes the numbers. Reading files is not done here."""

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]
NormCast = Literal["before_weight", "after_weight"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
RouterOrder = Literal["topk_softmax", "softmax_topk"]


class DrafterWarning(UserWarning):
    """Something about a drafter was guessed or left unused, or is asked beyond its training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one layer kind; half-split, frequencies as in the family's paper.

    `original_max_positions` is what llama3 and YaRN scaling start from. `rotary_fraction` is the
    share of frequencies that rotate under `proportional`; the rest are zero.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    rotary_fraction: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts: which scores are normalised when, and how gate and up are activated."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    router_order: RouterOrder
    normalise_top_k: bool = True
    router_bias: bool = False
    expert_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer. `window` counts keys including the query's own; None is full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    value_from_key: bool = False
    moe: MoEConfig | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A target language model of any supported family.

    `attention_scale` None means head_dim ** -0.5. `norm_cast` says whether a norm returns to the
    compute dtype before or after the product with its weight. `post_norms` are the norms after
    attention and MLP (Gemma 4). `swiglu_limit` and `swiglu_alpha` belong to `clamped_swiglu`.
    `embedding_scale` multiplies embeddings (rounded to the compute dtype first).
    `max_positions` is the context for which the model was configured.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    max_positions: int
    norm_eps: float
    norm_cast: NormCast
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    post_norms: bool = False
    layer_scalar: bool = False
    tied_embeddings: bool = False
    embedding_scale: float | None = None
    final_soft_cap: float | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A P-EAGLE or EAGLE-3 drafter: a small llama- or qwen3-style decoder over fused target states.

    `taps` are the tapped target layers in convention T: tap t is the residual stream that enters
    layer t (0 the embedding output, num_layers the last layer's output before the final norm).
    `input_size` of the fusion is len(taps) * target_hidden_size (`use_taps` False: the target's
    final hidden state alone; `fuse` False then means that there is no fc). `vocab_size` counts the
    rows of the embedding, `target_vocab_size` the ids that the target can emit (None: the same):
    a draft logit that stands for no such id is -inf. `mask_token_id` is None for a head that was
    not trained for parallel drafting. `num_depths` is the trained depth, if known.
    """

    style: Literal["llama", "qwen3"] = "llama"
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    target_hidden_size: int
    layers: tuple[LayerConfig, ...]
    taps: tuple[int, ...]
    max_positions: int
    norm_eps: float = 1e-5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    use_taps: bool = True
    fuse: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    own_embedding: bool = True
    embedding_scale: float | None = None
    mask_token_id: int | None = None
    num_depths: int | None = None
    num_speculative_tokens: int | None = None
    parallel_drafting: bool = True
    target_vocab_size: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def input_size(self) -> int:
        """Width of what the fusion reads."""
        return (len(self.taps) if self.use_taps else 1) * self.target_hidden_size
