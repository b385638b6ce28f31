"""Which tensors a drafter's file holds, and how they become parameters and parameters them.

Files keep matrices [out, in] (torch layout) and heads side by side; parameters are [in, out] with
heads kept apart. Pure functions on arrays; files are opened in drafter_files.py.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from peagle_jax.checkpoints.fields import CheckpointError
from peagle_jax.models.config import DrafterConfig, LayerConfig

# Left behind by training code or older writers; nothing that drafts reads them.
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter of the drafter and the file's tensors it is made of.

    `tensors` pairs each name with its shape in the file, `keys` are the config keys that the shape
    comes from. `join` makes the parameter of the tensors, in that order; `split` goes back.
    """

    parameter: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    keys: str
    join: Callable[[Arrays], np.ndarray]
    split: Callable[[np.ndarray], Arrays]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.tensors)


def drafter_parts(config: DrafterConfig) -> tuple[Part, ...]:
    """Every parameter of a drafter of this config except the offsets d2t, with canonical names.

    Whether the file must hold the embedding and the head is for the caller to judge.
    """
    hidden, width, tap = config.hidden_size, config.input_size, config.target_hidden_size
    parts = [
        _same("embedding", "embed_tokens.weight", (config.vocab_size, hidden), "vocab_size"),
        _transposed(
            "head", "lm_head.weight", (config.draft_vocab_size, hidden), "draft_vocab_size"
        ),
        _same("norm", "norm.weight", (hidden,), "hidden_size"),
    ]
    taps_key = "target_hidden_size x number of eagle_aux_hidden_state_layer_ids"
    if config.fuse:
        parts.append(_transposed("fc", "fc.weight", (hidden, width), f"hidden_size, {taps_key}"))
    if config.norm_before_fc:
        parts.append(_same("input_norm", "input_norm.weight", (width,), taps_key))
    if config.fc_norm:
        names = [f"fc_norm.{i}.weight" for i in range(width // tap)]
        parts.append(_stacked("fc_norms", names, (tap,), "target_hidden_size"))
    if config.parallel_drafting:
        parts.append(_mask_hidden(width, taps_key))
    for index, layer in enumerate(config.layers):
        parts.extend(_layer_parts(config, layer, index))
    return tuple(parts)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name of each tensor in a file -> its name there, ignored tensors left out.

    `model.` in front is optional and `midlayer.` is another name of `layers.0.`. Raises
    CheckpointError where two tensors of the file have the same meaning.
    """
    found: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix("model.")
        if plain.startswith("midlayer."):
            plain = "layers.0." + plain.removeprefix("midlayer.")
        if plain in _IGNORED or plain.endswith(_IGNORED_SUFFIX):
            continue
        if plain in found:
            raise CheckpointError(f"tensors {found[plain]!r} and {name!r} mean the same; keep one")
        found[plain] = name
    return found


def _layer_parts(config: DrafterConfig, layer: LayerConfig, index: int) -> Iterator[Part]:
    hidden, inner = config.hidden_size, config.intermediate_size
    ours, file = f"layers.{index}.", f"layers.{index}."
    first = "embedding_norm" if index == 0 else "attention_norm"
    yield _same(ours + first, file + "input_layernorm.weight", (hidden,), "hidden_size")
    if index == 0:
        yield _same(ours + "hidden_norm", file + "hidden_norm.weight", (hidden,), "hidden_size")
    yield _same(
        ours + "mlp_norm", file + "post_attention_layernorm.weight", (hidden,), "hidden_size"
    )
    yield _qkv(ours, file, layer, (2 if index == 0 else 1) * hidden)
    yield _output(ours, file, layer, hidden)
    mlp = [file + "mlp.gate_proj", file + "mlp.up_proj"]
    yield _gate_up(ours + "gate_up", [f"{name}.weight" for name in mlp], (inner, hidden))
    yield _transposed(
        ours + "down", file + "mlp.down_proj.weight", (hidden, inner), "intermediate_size"
    )
    if config.attention_bias:
        yield _qkv_bias(ours, file, layer)
        yield _same(ours + "o_bias", file + "self_attn.o_proj.bias", (hidden,), "hidden_size")
    if config.mlp_bias:
        names = [f"{name}.bias" for name in mlp]
        yield _stacked(ours + "gate_up_bias", names, (inner,), "intermediate_size")
        yield _same(ours + "down_bias", file + "mlp.down_proj.bias", (hidden,), "hidden_size")
    if config.style == "qwen3":
        for ours_name in ("q_norm", "k_norm"):
            name = f"{file}self_attn.{ours_name}.weight"
            yield _same(ours + ours_name, name, (layer.head_dim,), "head_dim")


def _same(parameter: str, name: str, shape: tuple[int, ...], keys: str) -> Part:
    return Part(
        parameter=parameter,
        tensors=((name, shape),),
        keys=keys,
        join=lambda arrays: arrays[0],
        split=lambda value: (value,),
    )


def _transposed(parameter: str, name: str, shape: tuple[int, int], keys: str) -> Part:
    return Part(
        parameter=parameter,
        tensors=((name, shape),),
        keys=keys,
        join=lambda arrays: arrays[0].T,
        split=lambda value: (value.T,),
    )


def _stacked(parameter: str, names: list[str], shape: tuple[int, ...], keys: str) -> Part:
    return Part(
        parameter=parameter,
        tensors=tuple((name, shape) for name in names),
        keys=keys,
        join=np.stack,
        split=tuple,
    )


def _mask_hidden(width: int, keys: str) -> Part:
    """Any shape of the right size is read; written as the public trainers write it."""
    return Part(
        parameter="mask_hidden",
        tensors=(("mask_hidden", (1, 1, width)),),
        keys=keys,
        join=lambda arrays: arrays[0].reshape(-1),
        split=lambda value: (value.reshape(1, 1, -1),),
    )


def _gate_up(parameter: str, names: list[str], shape: tuple[int, int]) -> Part:
    return Part(
        parameter=parameter,
        tensors=tuple((name, shape) for name in names),
        keys="intermediate_size, hidden_size",
        join=lambda arrays: np.stack([array.T for array in arrays], axis=1),
        split=lambda value: (value[:, 0].T, value[:, 1].T),
    )


def _qkv(ours: str, file: str, layer: LayerConfig, width: int) -> Part:
    kv, group, size = layer.num_kv_heads, layer.group_size, layer.head_dim

    def join(arrays: Arrays) -> np.ndarray:
        query, key, value = arrays
        heads = (
            query.reshape(kv, group, size, width),
            key.reshape(kv, 1, size, width),
            value.reshape(kv, 1, size, width),
        )
        return np.moveaxis(np.concatenate(heads, axis=1), 3, 0)

    def split(value: np.ndarray) -> Arrays:
        heads = np.moveaxis(value, 0, 3)
        slots = (heads[:, :group], heads[:, group], heads[:, group + 1])
        return tuple(slot.reshape(-1, width) for slot in slots)

    rows = (layer.num_heads * size, kv * size, kv * size)
    return Part(
        parameter=ours + "qkv",
        tensors=tuple(
            (f"{file}self_attn.{name}_proj.weight", (count, width))
            for name, count in zip("qkv", rows, strict=True)
        ),
        keys="num_attention_heads, num_key_value_heads, head_dim, hidden_size",
        join=join,
        split=split,
    )


def _qkv_bias(ours: str, file: str, layer: LayerConfig) -> Part:
    kv, group, size = layer.num_kv_heads, layer.group_size, layer.head_dim

    def join(arrays: Arrays) -> np.ndarray:
        query, key, value = arrays
        heads = (
            query.reshape(kv, group, size),
            key.reshape(kv, 1, size),
            value.reshape(kv, 1, size),
        )
        return np.concatenate(heads, axis=1)

    def split(value: np.ndarray) -> Arrays:
        slots = (value[:, :group], value[:, group], value[:, group + 1])
        return tuple(slot.reshape(-1) for slot in slots)

    rows = (layer.num_heads * size, kv * size, kv * size)
    return Part(
        parameter=ours + "qkv_bias",
        tensors=tuple(
            (f"{file}self_attn.{name}_proj.bias", (count,))
            for name, count in zip("qkv", rows, strict=True)
        ),
        keys="num_attention_heads, num_key_value_heads, head_dim",
        join=join,
        split=split,
    )


def _output(ours: str, file: str, layer: LayerConfig, hidden: int) -> Part:
    shape = (layer.num_kv_heads, layer.group_size, layer.head_dim)
    return Part(
        parameter=ours + "o",
        tensors=((f"{file}self_attn.o_proj.weight", (hidden, layer.num_heads * layer.head_dim)),),
        keys="hidden_size, num_attention_heads, head_dim",
        join=lambda arrays: np.moveaxis(arrays[0].reshape(hidden, *shape), 0, 3),
        split=lambda value: (np.moveaxis(value, 3, 0).reshape(hidden, -1),),
    )
