"""Which stored tensor fills which parameter of a target, for Hugging Face checkpoints.

Parameters and shapes are those of models/target.py. The plan is strict: a tensor that no parameter
needs is an error unless it belongs to a part that text does not use.
"""

import dataclasses
import re

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.hf_config import Quantization
from peagle_jax.checkpoints.planner import Part, Plan, Planner, stored_names
from peagle_jax.checkpoints.shards import Shards
from peagle_jax.checkpoints.sources import Index, Stored
from peagle_jax.models.config import LayerConfig, TargetConfig

# Where the decoder may sit: text models, multimodal models (new and old naming), bare decoders.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")

# Buffers that old versions saved; the values follow from the config.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_OTHER_MODALITIES = re.compile(
    r"^(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio|multi_modal_projector)\."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """Plans by parameter name; `equal` are pairs of tensors that must hold the same bytes."""

    parameters: dict[str, Plan]
    equal: tuple[tuple[Stored, Stored], ...] = ()


def plan_target(
    config: TargetConfig,
    shards: Shards,
    quantization: Quantization | None = None,
    *,
    keep_packed: bool = False,
) -> TargetPlan:
    """How every parameter of the target is made from the checkpoint.

    Raises CheckpointError naming file and tensor for a missing or unknown tensor, a wrong shape or
    dtype, and experts stored in two layouts at once.
    """
    planner = Planner(shards=shards, quantization=quantization, keep_packed=keep_packed)
    prefix = decoder_prefix(shards)
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = f"{prefix}embed_tokens.weight"
    plans: dict[str, Plan] = {"embedding": planner.vector(embedding, (vocab, hidden))}
    for index, layer in enumerate(config.layers):
        names = f"{prefix}layers.{index}."
        for name, plan in _layer(planner, names, config, layer).items():
            plans[f"layers.{index}.{name}"] = plan
    plans["norm"] = planner.vector(f"{prefix}norm.weight", (hidden,))
    equal: list[tuple[Stored, Stored]] = []
    head = _head_key(shards)
    if not config.tied_embeddings:
        part = Part(
            key=head, box=_box(hidden, vocab), rows=(vocab,), columns=(hidden,), axes=(1, 0)
        )
        plans["head"] = planner.matrix((hidden, vocab), [part], whole_axis=0)
    elif head in shards.files:
        equal = [tuple(planner.plain(key, (vocab, hidden), None) for key in (head, embedding))]
    known = stored_names(plans.values()) | {pair[0].name for pair in equal}
    _refuse_unknown(shards, known, config)
    return TargetPlan(parameters=plans, equal=tuple(equal))


def decoder_prefix(shards: Shards) -> str:
    """What stands before `layers.0...` in this checkpoint's tensor names."""
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in shards.files:
            return prefix
    raise CheckpointError(f"{shards.where}: tensor 'model.embed_tokens.weight' is missing")


def skipped(name: str) -> bool:
    """Whether a tensor is known to play no role for text."""
    return bool(_DERIVED.search(name) or _OTHER_MODALITIES.match(name))


def _head_key(shards: Shards) -> str:
    other = "language_model.lm_head.weight"
    return other if other in shards.files else "lm_head.weight"


def _refuse_unknown(shards: Shards, known: set[str], config: TargetConfig) -> None:
    unknown = sorted(name for name in shards.files if name not in known and not skipped(name))
    if not unknown:
        return
    listed = ", ".join(repr(name) for name in unknown[:5])
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    raise CheckpointError(
        f"{shards.files[unknown[0]].path}: unknown tensor {listed}{more}; a {config.family} model "
        f"with this config has {len(known)} tensors and not these"
    )


def _layer(
    planner: Planner, names: str, config: TargetConfig, layer: LayerConfig
) -> dict[str, Plan]:
    hidden = config.hidden_size
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.post_norms:
        norms |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    plans: dict[str, Plan] = {
        name: planner.vector(f"{names}{key}.weight", (hidden,)) for name, key in norms.items()
    }
    plans |= _attention(planner, f"{names}self_attn.", config, layer)
    if config.layer_scalar:
        plans["layer_scalar"] = planner.vector(f"{names}layer_scalar", (1,), ())
    if layer.moe is None:
        plans |= _dense_mlp(planner, f"{names}mlp.", config)
    elif config.family == "gpt_oss":
        plans |= _gpt_oss_experts(planner, f"{names}mlp.", config, layer)
    else:
        plans |= _qwen_experts(planner, f"{names}mlp.", config, layer)
    return plans


def _attention(
    planner: Planner, names: str, config: TargetConfig, layer: LayerConfig
) -> dict[str, Plan]:
    hidden, heads, group, size = (
        config.hidden_size,
        layer.num_kv_heads,
        layer.group_size,
        layer.head_dim,
    )
    slots = {"q": (0, group), "k": (group, 1)}
    if not layer.value_from_key:
        slots["v"] = (group + 1, 1)
    total = sum(count for _, count in slots.values())
    plans: dict[str, Plan] = {}
    plans["qkv"] = planner.matrix(
        (hidden, heads, total, size),
        [
            Part(
                key=f"{names}{letter}_proj.weight",
                box=(*_box(hidden, heads), slice(first, first + count), slice(0, size)),
                rows=(heads, count, size),
                columns=(hidden,),
                axes=(3, 0, 1, 2),
            )
            for letter, (first, count) in slots.items()
        ],
        whole_axis=0,
    )
    output = Part(
        key=f"{names}o_proj.weight",
        box=_box(heads, group, size, hidden),
        rows=(hidden,),
        columns=(heads, group, size),
        axes=(1, 2, 3, 0),
    )
    plans["o"] = planner.matrix((heads, group, size, hidden), [output], whole_axis=3)
    if config.attention_bias:
        plans["qkv_bias"] = planner.joined(
            (heads, total, size),
            [
                (
                    f"{names}{letter}_proj.bias",
                    (slice(0, heads), slice(first, first + count), slice(0, size)),
                )
                for letter, (first, count) in slots.items()
            ],
        )
        plans["o_bias"] = planner.vector(f"{names}o_proj.bias", (hidden,))
    if config.attention_sinks:
        view = (heads, group)
        plans["sinks"] = planner.vector(f"{names}sinks", (layer.num_heads,), view)
    if config.qk_norm:
        plans["q_norm"] = planner.vector(f"{names}q_norm.weight", (size,))
        plans["k_norm"] = planner.vector(f"{names}k_norm.weight", (size,))
    return plans


def _dense_mlp(planner: Planner, names: str, config: TargetConfig) -> dict[str, Plan]:
    hidden, inner = config.hidden_size, config.intermediate_size
    plans: dict[str, Plan] = {}
    plans["gate_up"] = planner.matrix(
        (hidden, 2, inner),
        [
            Part(
                key=f"{names}{letter}_proj.weight",
                box=(slice(0, hidden), slice(slot, slot + 1), slice(0, inner)),
                rows=(1, inner),
                columns=(hidden,),
                axes=(2, 0, 1),
            )
            for slot, letter in enumerate(("gate", "up"))
        ],
        whole_axis=0,
    )
    down = Part(
        key=f"{names}down_proj.weight",
        box=_box(inner, hidden),
        rows=(hidden,),
        columns=(inner,),
        axes=(1, 0),
    )
    plans["down"] = planner.matrix((inner, hidden), [down], whole_axis=1)
    if config.mlp_bias:
        plans["gate_up_bias"] = planner.joined(
            (2, inner),
            [
                (f"{names}{letter}_proj.bias", (slice(slot, slot + 1), slice(0, inner)))
                for slot, letter in enumerate(("gate", "up"))
            ],
        )
        plans["down_bias"] = planner.vector(f"{names}down_proj.bias", (hidden,))
    return plans


def _gpt_oss_experts(
    planner: Planner, names: str, config: TargetConfig, layer: LayerConfig
) -> dict[str, Plan]:
    """Gate and up interleaved (even, odd); input-major when plain, output-major when MXFP4."""
    assert layer.moe is not None
    hidden, experts, inner = (
        config.hidden_size,
        layer.moe.num_experts,
        layer.moe.intermediate_size,
    )
    name = f"{names}experts."
    plans: dict[str, Plan] = {
        "router": planner.vector(f"{names}router.weight", (experts, hidden), None, (1, 0)),
        "router_bias": planner.vector(f"{names}router.bias", (experts,)),
        "experts_gate_up_bias": planner.vector(
            f"{name}gate_up_proj_bias", (experts, 2 * inner), (experts, inner, 2), (0, 2, 1)
        ),
        "experts_down_bias": planner.vector(f"{name}down_proj_bias", (experts, hidden)),
    }
    if f"{name}gate_up_proj_blocks" in planner.shards.files:
        plans["experts_gate_up"] = planner.mxfp4(
            f"{name}gate_up_proj", (experts, inner, 2), hidden, (0, 3, 2, 1)
        )
        plans["experts_down"] = planner.mxfp4(
            f"{name}down_proj", (experts, hidden), inner, (0, 2, 1)
        )
    else:
        plans["experts_gate_up"] = planner.vector(
            f"{name}gate_up_proj",
            (experts, hidden, 2 * inner),
            (experts, hidden, inner, 2),
            (0, 1, 3, 2),
        )
        plans["experts_down"] = planner.vector(f"{name}down_proj", (experts, inner, hidden))
    return plans


def _qwen_experts(
    planner: Planner, names: str, config: TargetConfig, layer: LayerConfig
) -> dict[str, Plan]:
    """One tensor per expert and matrix, or all experts in two (gate rows, then up rows)."""
    assert layer.moe is not None
    hidden, experts, inner = (
        config.hidden_size,
        layer.moe.num_experts,
        layer.moe.intermediate_size,
    )
    name = f"{names}experts."
    plans: dict[str, Plan] = {
        "router": planner.vector(f"{names}gate.weight", (experts, hidden), None, (1, 0))
    }
    if f"{name}gate_up_proj" in planner.shards.files:
        one = f"{name}0.gate_proj.weight"
        if one in planner.shards.files:
            raise CheckpointError(
                f"{planner.shards.file(one).path}: experts in two layouts: {one!r} beside "
                f"'{name}gate_up_proj'; keep one"
            )
        plans["experts_gate_up"] = planner.vector(
            f"{name}gate_up_proj",
            (experts, 2 * inner, hidden),
            (experts, 2, inner, hidden),
            (0, 3, 1, 2),
        )
        plans["experts_down"] = planner.vector(
            f"{name}down_proj", (experts, hidden, inner), None, (0, 2, 1)
        )
        return plans
    plans["experts_gate_up"] = planner.matrix(
        (experts, hidden, 2, inner),
        [
            Part(
                key=f"{name}{expert}.{letter}_proj.weight",
                box=(
                    slice(expert, expert + 1),
                    slice(0, hidden),
                    slice(slot, slot + 1),
                    slice(0, inner),
                ),
                rows=(1, 1, inner),
                columns=(hidden,),
                axes=(0, 3, 1, 2),
            )
            for expert in range(experts)
            for slot, letter in enumerate(("gate", "up"))
        ],
        whole_axis=1,
    )
    plans["experts_down"] = planner.matrix(
        (experts, inner, hidden),
        [
            Part(
                key=f"{name}{expert}.down_proj.weight",
                box=(slice(expert, expert + 1), *_box(inner, hidden)),
                rows=(1, hidden),
                columns=(inner,),
                axes=(0, 2, 1),
            )
            for expert in range(experts)
        ],
        whole_axis=2,
    )
    return plans


def _box(*sizes: int) -> Index:
    return tuple(slice(0, size) for size in sizes)
