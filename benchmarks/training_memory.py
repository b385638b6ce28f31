"""Peak memory of a training step, compiled for GPUs that are not there.

The step is the product's own, with its kernels, for the gpt-oss-20b head: 4 layers, hidden 2,880,
vocabulary 201,088, K = 8, r = 0.8, head trained, float32 parameters and moments, stored target
states in bfloat16. The dense mask is what published code computes: all sampled elements at once.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.ahead_of_time import COMPILER_OPTIONS, abstract_mesh, lowering_for
from peagle_jax.models.config import DrafterConfig, LayerConfig, RopeConfig
from peagle_jax.models.drafter import Drafter
from peagle_jax.sharding import MESH_AXES, parameter_spec
from train.objective import make_objective
from train.optimizer import OptimizerConfig, make_optimizer
from train.rows import TargetHead
from train.sampling import CodConfig, count_table, max_mask_rows
from train.spread import BATCH_AXES
from train.step import TrainState, peagle_gradients, state_shardings, step_function

GIB = 2**30
COD = CodConfig(num_depths=8, ratio=0.8)
DTYPE = jnp.bfloat16


def gpt_oss_20b_head() -> DrafterConfig:
    """The public head's sizes; the MLP is 3 x hidden, as for every target of experts."""
    rope = RopeConfig(
        kind="llama3", theta=500_000.0, factor=8.0, original_max_positions=8192,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    layer = LayerConfig(num_heads=64, num_kv_heads=8, head_dim=64, rope=rope)
    return DrafterConfig(
        vocab_size=201_088,
        draft_vocab_size=201_088,
        hidden_size=2_880,
        intermediate_size=8_640,
        target_hidden_size=2_880,
        layers=(layer,) * 4,
        taps=(2, 12, 21),
        max_positions=131_072,
        mask_token_id=201_020,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device: arguments (state, target head, batch), temporaries, and their sum."""

    arguments: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries

    def as_dict(self) -> dict[str, float]:
        parts = {"arguments": self.arguments, "temporaries": self.temporaries, "peak": self.peak}
        return {f"{name}_gib": round(value / GIB, 2) for name, value in parts.items()}


def step_memory(
    num_rows: int,
    *,
    partition: str = "structured",
    num_chunks: int | None = None,
    chunk_rows: int | None = None,
    sequence: int = 1,
    train_head: bool = True,
    device: str = "h200",
) -> Memory:
    """Memory of one step on one sequence of `num_rows`, over `sequence` GPUs."""
    config = gpt_oss_20b_head()
    mesh, gpus = _mesh(device, sequence)
    objective = make_objective(
        config,
        COD,
        num_rows,
        partition=partition,
        num_chunks=num_chunks,
        chunk_rows=chunk_rows,
        mesh=mesh,
        train_head=train_head,
        dtype=DTYPE,
    )
    optimizer = make_optimizer(OptimizerConfig(), 1000)
    table = jnp.asarray(count_table(COD, num_rows))
    step = step_function(peagle_gradients(objective, table), optimizer)
    arguments = _arguments(config, optimizer, num_rows, train_head, mesh, gpus)
    return _compile(step, arguments, gpus, device)


def dense_memory(num_rows: int, device: str = "h200") -> Memory:
    """The published way: one pass over all elements under a mask of elements x elements.

    Loss and gradients alone; every layer is checkpointed, the head's logits are left out, so this
    is less than the real thing. Where one layer's scores alone pass 1 TiB the compiler finds no
    tiling; their size is given then.
    """
    config = gpt_oss_20b_head()
    elements = num_rows + max_mask_rows(COD, num_rows)
    layer, hidden = config.layers[0], config.hidden_size
    scores = layer.num_heads * elements**2 * 4
    if scores > 2**40:
        return Memory(arguments=0, temporaries=scores)

    def attention(x: Any, weights: Any, mask: Any) -> Any:
        mixed = jnp.einsum("mh,hkgd->mkgd", x, weights[0])
        q, k, v = mixed[:, :, :8], mixed[:, :, 8], mixed[:, :, 9]
        scores = jnp.einsum("mkgd,nkd->kgmn", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(mask[None, None], scores, -jnp.inf)
        out = jnp.einsum("kgmn,nkd->mkgd", jax.nn.softmax(scores).astype(DTYPE), v)
        return x + jnp.einsum("mkgd,kgdh->mh", out, weights[1])

    def loss(weights: Any, x: Any, anchors: Any, depths: Any) -> Any:
        prefix = (depths[None, :] == 0) & (anchors[None, :] <= anchors[:, None])
        same = (anchors[None, :] == anchors[:, None]) & (depths[None, :] <= depths[:, None])
        mask = prefix | same
        for own in weights:
            x = jax.checkpoint(attention)(x, own, mask)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    shape = jax.ShapeDtypeStruct
    qkv = shape((hidden, layer.num_kv_heads, 10, layer.head_dim), DTYPE)
    out = shape((layer.num_kv_heads, 8, layer.head_dim, hidden), DTYPE)
    rows = (shape((elements, hidden), DTYPE), *(shape((elements,), jnp.int32),) * 2)
    _, gpus = _mesh(device, 1)
    return _compile(jax.grad(loss), (((qkv, out),) * 4, *rows), gpus, device)


def _mesh(device: str, sequence: int) -> tuple[Mesh | None, Mesh]:
    """The mesh that the objective is told of (None for one GPU), and the one compiled for."""
    shape = (1, 1, 1, sequence, 1)
    gpus = abstract_mesh(device, shape, MESH_AXES)
    return (None if sequence == 1 else gpus), gpus


def _arguments(
    config: DrafterConfig,
    optimizer: optax.GradientTransformation,
    num_rows: int,
    train_head: bool,
    mesh: Mesh | None,
    gpus: Mesh,
) -> tuple[Any, ...]:
    """Shapes of (state, frozen, head, batch), each with its sharding."""
    shapes: dict[str, Any] = {}

    def source(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype)
        return shapes[name]

    Drafter(config, source=source)
    fixed = {"d2t"} if train_head else {"d2t", "head"}
    learned = {n: s for n, s in shapes.items() if n not in fixed}
    frozen = {n: _cast(s, n) for n, s in shapes.items() if n in fixed}
    moments = jax.eval_shape(optimizer.init, learned)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), learned, moments, key)
    places = state_shardings(state, gpus)
    state = jax.tree.map(lambda s, p: _placed(s, p), state, places)
    frozen = {
        n: _placed(s, NamedSharding(gpus, parameter_spec(n, s.shape, gpus)))
        for n, s in frozen.items()
    }
    width, rows = config.target_hidden_size, num_rows
    matrix = jax.ShapeDtypeStruct((width, config.vocab_size), DTYPE)
    head = TargetHead(matrix=_placed(matrix, NamedSharding(gpus, PartitionSpec())))
    kinds = {
        "tokens": ((rows,), jnp.int32),
        "loss_mask": ((rows,), jnp.bool_),
        "document_ids": ((rows,), jnp.int32),
        "taps": ((rows, config.input_size), DTYPE),
        "last_hidden": ((rows, width), DTYPE),
    }
    batch = {}
    for name, (shape, dtype) in kinds.items():
        # Rows of hidden states arrive spread over the sequence axis.
        axis = "sequence" if mesh is not None and len(shape) == 2 else None
        spec = PartitionSpec(None, BATCH_AXES, axis, *[None] * (len(shape) - 1))
        whole = jax.ShapeDtypeStruct((1, 1, *shape), dtype)
        batch[name] = _placed(whole, NamedSharding(gpus, spec))
    batch["numbers"] = _placed(
        jax.ShapeDtypeStruct((1, 1), jnp.int32), NamedSharding(gpus, PartitionSpec())
    )
    return state, frozen, head, batch


def _cast(shape: jax.ShapeDtypeStruct, name: str) -> jax.ShapeDtypeStruct:
    return shape if name == "d2t" else jax.ShapeDtypeStruct(shape.shape, DTYPE)


def _placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _compile(function: Callable, arguments: tuple[Any, ...], gpus: Mesh, device: str) -> Memory:
    with lowering_for(device, gpus):
        place = NamedSharding(gpus, PartitionSpec())
        arguments = jax.tree.map(
            lambda s: s if s.sharding is not None else _placed(s, place), arguments
        )
        lowered = jax.jit(lambda *values: function(*values), donate_argnums=0).lower(*arguments)
    found = lowered.compile(compiler_options=COMPILER_OPTIONS).memory_analysis()
    extra = found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(
        arguments=found.argument_size_in_bytes,
        temporaries=found.temp_size_in_bytes + max(0, extra),
    )


def describe(memory: Memory) -> str:
    """Figures in GiB, or "does not fit"."""
    figures = memory.as_dict()
    fits = "" if memory.peak <= 141e9 else "  (does not fit)"
    parts = (f"{math.ceil(figures[f'{name}_gib'] * 10) / 10:.1f}" for name in
             ("arguments", "temporaries", "peak"))  # fmt: skip
    return "  ".join(parts) + fits
