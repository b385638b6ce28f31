"""`peagle convert` for targets: any checkpoint that is read becomes plain safetensors.

Block FP8, MXFP4 and GGUF types are unpacked, the vision part is left out, and names are those of
Hugging Face, so that transformers and this package load the result. Tensors stream from file to
file a few megabytes at a time. Drafters: drafter_files.py.
"""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.checkpoints.converted_config import converted_config, write_gguf_tokenizer
from peagle_jax.checkpoints.fields import CheckpointError, PathLike
from peagle_jax.checkpoints.load import plan_checkpoint
from peagle_jax.checkpoints.planner import PackedPlan
from peagle_jax.checkpoints.safetensors_file import LazyTensor, write_safetensors
from peagle_jax.checkpoints.shards import INDEX_NAME, SINGLE_NAME, open_shards
from peagle_jax.checkpoints.sources import (
    Fp8Matrix,
    GgufTensorView,
    Index,
    Mxfp4Tensor,
    Source,
    Stored,
    read_parts,
)
from peagle_jax.checkpoints.target_weights import TargetPlan, decoder_prefix
from peagle_jax.models.config import TargetConfig

MAX_SHARD_BYTES = 5_000_000_000

# Text files that travel with a checkpoint; weights and configs are written anew.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
)

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_target(
    source: PathLike,
    destination: PathLike,
    *,
    dtype: str | None = None,
    fused_experts: bool = False,
    config_file: str = "config.json",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the target at `source` (folder or GGUF) as plain safetensors into a new folder.

    dtype: "float32" or "bfloat16" for every tensor; None loses nothing: stored dtypes are kept,
    MXFP4 becomes bfloat16, which holds its values exactly, FP8 and GGUF types become float32.
    fused_experts: write qwen3_moe experts as two tensors per layer, not one per expert and matrix.
    The folder appears whole or not at all.

    Raises CheckpointError as `load_target` does, and where `destination` exists and is not empty.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
    target = Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not empty; choose a new folder")
    config, plan = plan_checkpoint(source, config_file=config_file)
    if fused_experts and config.family != "qwen3_moe":
        raise ValueError(f"fused_experts is for qwen3_moe; {source} is {config.family}")
    wanted = None if dtype is None else _DTYPES[dtype]
    tensors = target_tensors(
        config, plan, prefix=_prefix(Path(source)), dtype=wanted, fused_experts=fused_experts
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    part.mkdir()
    try:
        _write_shards(part, tensors, max_shard_bytes, progress)
        name = str(max((t.dtype for t in tensors.values()), key=lambda d: d.itemsize))
        text = converted_config(Path(source), config, config_file=config_file, dtype=name)
        (part / "config.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        _write_companions(Path(source), part)
        if target.exists():
            target.rmdir()
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def target_tensors(
    config: TargetConfig,
    plan: TargetPlan,
    *,
    prefix: str = "model.",
    dtype: np.dtype[Any] | None = None,
    fused_experts: bool = False,
) -> dict[str, LazyTensor]:
    """The plan's tensors under their Hugging Face names, each read when it is written.

    `prefix` is what the stored names have before the decoder's own names.
    """
    tensors: dict[str, LazyTensor] = {}
    for parameter, array in plan.parameters.items():
        assert not isinstance(array, PackedPlan), "plans for conversion are made unpacked"
        for piece in array.pieces:
            name = _plain_name(piece.source, prefix)
            made = dtype or _plain_dtype(piece.source)
            if parameter.endswith((".experts_gate_up", ".experts_down")):
                tensors |= _experts(config, name, piece.source, made)
            else:
                tensors[name] = _whole_tensor(piece.source, made)
    return _fuse(config, tensors) if fused_experts else tensors


def _plain_name(source: Source, prefix: str) -> str:
    if isinstance(source, GgufTensorView):
        *layer, name, kind = source.name.split(".")
        head = f"model.layers.{layer[1]}." if layer else ""
        return f"{head}{_GGUF_NAMES[name]}.{kind}"
    assert isinstance(source, Stored | Fp8Matrix | Mxfp4Tensor)
    if isinstance(source, Mxfp4Tensor):
        name = source.blocks.name.removesuffix("_blocks")
    else:
        name = source.values.name if isinstance(source, Fp8Matrix) else source.name
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    return "model." + name.removeprefix(prefix)


def _plain_dtype(source: Source) -> np.dtype[Any]:
    """The smallest dtype that holds the source's values exactly."""
    return _DTYPES["bfloat16"] if isinstance(source, Mxfp4Tensor) else source.dtype


def _whole_tensor(source: Source, dtype: np.dtype[Any]) -> LazyTensor:
    """A source whose elements are the tensor's in the same order, its axes split or not."""
    return LazyTensor(
        shape=_file_shape(source), dtype=dtype, parts=lambda: read_parts(source, dtype)
    )


def _file_shape(source: Source) -> tuple[int, ...]:
    if isinstance(source, GgufTensorView):
        return tuple(source.file.tensor(source.name).shape)
    if isinstance(source, Fp8Matrix):
        return source.values.file.info(source.values.name).shape
    assert isinstance(source, Stored)
    return source.file.info(source.name).shape


def _experts(
    config: TargetConfig, name: str, source: Source, dtype: np.dtype[Any]
) -> dict[str, LazyTensor]:
    """Expert matrices in the layout that transformers writes for the family."""
    if isinstance(source, Mxfp4Tensor):
        return {name: _mxfp4_tensor(source, dtype)}
    if config.family != "qwen3_moe" or not re.search(r"experts\.(gate_up|down)_proj$", name):
        return {name: _whole_tensor(source, dtype)}
    # All experts in one tensor: [E, 2, I, H] (gate, then up) or [E, H, I].
    stem, tensors = name.rsplit(".", 1)[0], {}
    for expert in range(source.shape[0]):
        if name.endswith("down_proj"):
            tensors[f"{stem}.{expert}.down_proj.weight"] = _entry(source, (expert,), dtype)
        else:
            for slot, letter in enumerate(("gate", "up")):
                key = f"{stem}.{expert}.{letter}_proj.weight"
                tensors[key] = _entry(source, (expert, slot), dtype)
    return tensors


def _entry(source: Source, entry: tuple[int, ...], dtype: np.dtype[Any]) -> LazyTensor:
    """One entry along the first axes of a source, as a tensor of its own."""
    shape = source.shape[len(entry) :]
    index: Index = (*(slice(i, i + 1) for i in entry), *(slice(0, n) for n in shape))

    def parts() -> Iterator[np.ndarray]:
        yield source.read(index).astype(dtype)

    return LazyTensor(shape=shape, dtype=dtype, parts=parts)


def _mxfp4_tensor(source: Mxfp4Tensor, dtype: np.dtype[Any]) -> LazyTensor:
    """[E, *out, in] as the input-major [E, in, out] of unpacked gpt-oss files, expert by expert."""
    experts, *out, inputs = source.shape

    def parts() -> Iterator[np.ndarray]:
        for expert in range(experts):
            index = (slice(expert, expert + 1), *(slice(0, n) for n in (*out, inputs)))
            matrix = source.read(index).reshape(-1, inputs).astype(dtype)
            yield np.ascontiguousarray(matrix.T)

    return LazyTensor(shape=(experts, inputs, int(np.prod(out))), dtype=dtype, parts=parts)


def _fuse(config: TargetConfig, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Per-expert tensors joined per layer: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    fused = {name: t for name, t in tensors.items() if ".mlp.experts." not in name}
    for index, layer in enumerate(config.layers):
        assert layer.moe is not None
        stem = f"model.layers.{index}.mlp.experts."
        for name, letters in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            pieces = [
                tensors[f"{stem}{expert}.{letter}_proj.weight"]
                for expert in range(layer.moe.num_experts)
                for letter in letters
            ]
            rows, columns = pieces[0].shape
            fused[f"{stem}{name}"] = LazyTensor(
                shape=(layer.moe.num_experts, rows * len(letters), columns),
                dtype=pieces[0].dtype,
                parts=lambda pieces=pieces: (part for piece in pieces for part in piece.parts()),
            )
    return fused


def _write_shards(
    folder: Path,
    tensors: dict[str, LazyTensor],
    max_shard_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """One file, or several of at most `max_shard_bytes` (a larger tensor gets one of its own)."""
    groups: list[dict[str, LazyTensor]] = [{}]
    for name, tensor in tensors.items():
        held = sum(t.nbytes for t in groups[-1].values())
        if groups[-1] and held + tensor.nbytes > max_shard_bytes:
            groups.append({})
        groups[-1][name] = tensor
    total, index = sum(t.nbytes for t in tensors.values()), {}
    counted = _counter(total, progress)
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = SINGLE_NAME if len(groups) == 1 else file
        watched = {name: counted(tensor) for name, tensor in group.items()}
        write_safetensors(folder / file, watched, {"format": "pt"})
        index |= dict.fromkeys(group, file)
    if len(groups) > 1:
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


def _counter(
    total: int, progress: Callable[[int, int], None] | None
) -> Callable[[LazyTensor], LazyTensor]:
    """Wraps tensors so that `progress` hears of every part that was made."""
    done = 0

    def counted(tensor: LazyTensor) -> LazyTensor:
        def parts() -> Iterator[np.ndarray]:
            nonlocal done
            for part in tensor.parts():
                yield part
                done += part.nbytes
                if progress is not None:
                    progress(done, total)

        return LazyTensor(shape=tensor.shape, dtype=tensor.dtype, parts=parts)

    return counted


def _write_companions(source: Path, folder: Path) -> None:
    if source.suffix == ".gguf":
        write_gguf_tokenizer(source, folder)
        return
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _prefix(source: Path) -> str:
    return "" if source.suffix == ".gguf" else decoder_prefix(open_shards(source))
