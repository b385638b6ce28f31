"""Which GGUF tensor fills which parameter of a llama-architecture target.

Query and key rows are stored interleaved for rotation of neighbouring pairs and put back into
half-split order, as in every other family.
"""

from pathlib import Path

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.checkpoints.gguf_config import ROPE_FACTORS, gguf_config
from peagle_jax.checkpoints.gguf_file import GgufFile, open_gguf
from peagle_jax.checkpoints.planner import Plan, stored_names
from peagle_jax.checkpoints.sources import ArrayPlan, GgufTensorView, Index, Piece, single
from peagle_jax.checkpoints.target_weights import TargetPlan
from peagle_jax.models.config import LayerConfig, TargetConfig


def plan_gguf(path: Path) -> tuple[TargetConfig, TargetPlan]:
    """Config and plan of a GGUF file; shapes are checked before any weight is read.

    Raises CheckpointError or GgufError naming file and tensor or key for another architecture and
    a missing, unknown or misshapen tensor.
    """
    file = open_gguf(path)
    config = gguf_config(file)
    vocab, hidden = config.vocab_size, config.hidden_size
    plans: dict[str, Plan] = {
        "embedding": single(gguf_view(file, "token_embd.weight", (vocab, hidden)))
    }
    for index, layer in enumerate(config.layers):
        for name, plan in _layer(file, f"blk.{index}.", config, layer).items():
            plans[f"layers.{index}.{name}"] = plan
    plans["norm"] = single(gguf_view(file, "output_norm.weight", (hidden,)))
    if not config.tied_embeddings:
        plans["head"] = single(gguf_view(file, "output.weight", (vocab, hidden)), (1, 0))
    unknown = sorted(set(file.tensors) - stored_names(plans.values()) - {ROPE_FACTORS})
    if unknown:
        raise CheckpointError(f"{file.path}: unknown tensor {unknown[0]!r} ({len(unknown)} in all)")
    return config, TargetPlan(parameters=plans)


def gguf_view(
    file: GgufFile,
    name: str,
    stored: tuple[int, ...],
    view: tuple[int, ...] | None = None,
    heads: int | None = None,
) -> GgufTensorView:
    """Tensor `name`, which must have shape `stored`, seen as `view`."""
    found = file.tensor(name).shape
    if tuple(found) != stored:
        raise CheckpointError(
            f"{file.path}: tensor {name!r}: found shape {list(found)}, the metadata asks for "
            f"{list(stored)}"
        )
    return GgufTensorView(file=file, name=name, shape=view or stored, heads=heads)


def _layer(file: GgufFile, names: str, config: TargetConfig, layer: LayerConfig) -> dict[str, Plan]:
    hidden, inner = config.hidden_size, config.intermediate_size
    plans: dict[str, Plan] = {
        "attention_norm": single(gguf_view(file, f"{names}attn_norm.weight", (hidden,))),
        "mlp_norm": single(gguf_view(file, f"{names}ffn_norm.weight", (hidden,))),
    }
    plans |= _attention(file, names, config, layer)
    gate_up = [
        Piece(
            box=(slice(0, hidden), slice(slot, slot + 1), slice(0, inner)),
            source=gguf_view(file, f"{names}{key}.weight", (inner, hidden), (1, inner, hidden)),
            axes=(2, 0, 1),
        )
        for slot, key in enumerate(("ffn_gate", "ffn_up"))
    ]
    plans["gate_up"] = ArrayPlan(shape=(hidden, 2, inner), pieces=tuple(gate_up))
    plans["down"] = single(gguf_view(file, f"{names}ffn_down.weight", (hidden, inner)), (1, 0))
    if config.mlp_bias:
        biases = [
            Piece(
                box=(slice(slot, slot + 1), slice(0, inner)),
                source=gguf_view(file, f"{names}{key}.bias", (inner,), (1, inner)),
                axes=(0, 1),
            )
            for slot, key in enumerate(("ffn_gate", "ffn_up"))
        ]
        plans["gate_up_bias"] = ArrayPlan(shape=(2, inner), pieces=tuple(biases))
        plans["down_bias"] = single(gguf_view(file, f"{names}ffn_down.bias", (hidden,)))
    return plans


def _attention(
    file: GgufFile, names: str, config: TargetConfig, layer: LayerConfig
) -> dict[str, Plan]:
    hidden, heads, group, size = (
        config.hidden_size,
        layer.num_kv_heads,
        layer.group_size,
        layer.head_dim,
    )
    weights, biases = [], []
    for letter, first, count in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
        rows = heads * count * size
        interleaved = None if letter == "v" else heads * count
        view = (heads, count, size)
        slots: Index = (slice(0, heads), slice(first, first + count), slice(0, size))
        name = f"{names}attn_{letter}"
        matrix = gguf_view(file, f"{name}.weight", (rows, hidden), (*view, hidden), interleaved)
        weights.append(Piece(box=(slice(0, hidden), *slots), source=matrix, axes=(3, 0, 1, 2)))
        if config.attention_bias:
            bias = gguf_view(file, f"{name}.bias", (rows,), view, interleaved)
            biases.append(Piece(box=slots, source=bias, axes=(0, 1, 2)))
    output = gguf_view(
        file,
        f"{names}attn_output.weight",
        (hidden, heads * group * size),
        (hidden, heads, group, size),
    )
    plans: dict[str, Plan] = {
        "qkv": ArrayPlan(shape=(hidden, heads, group + 2, size), pieces=tuple(weights)),
        "o": single(output, (1, 2, 3, 0)),
    }
    if config.attention_bias:
        plans["qkv_bias"] = ArrayPlan(shape=(heads, group + 2, size), pieces=tuple(biases))
        plans["o_bias"] = single(gguf_view(file, f"{names}attn_output.bias", (hidden,)))
    return plans
