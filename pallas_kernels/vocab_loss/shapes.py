"""Real shapes of the vocabulary loss, for tests and benchmarks: heads of the supported targets."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One call. `draft_vocab` None: drafter and target share the vocabulary."""

    name: str
    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int | None = None
    tied: bool = False
    soft_cap: float | None = None
    loss: str = "kl"
    head_trainable: bool = False
    rows: int = 4096
    dtype: str = "bfloat16"


SHAPES = (
    Shape(name="gpt-oss/full", hidden=2880, target_hidden=2880, vocab=201_088),
    Shape(
        name="gpt-oss/pruned", hidden=2880, target_hidden=2880, vocab=201_088, draft_vocab=32_000
    ),
    Shape(
        name="qwen3-coder/trained-head",
        hidden=2048,
        target_hidden=2048,
        vocab=151_936,
        draft_vocab=32_000,
        loss="lk_hybrid",
        head_trainable=True,
    ),
    Shape(
        name="gemma-4-31b/pruned",
        hidden=5376,
        target_hidden=5376,
        vocab=262_144,
        draft_vocab=32_000,
        tied=True,
        soft_cap=30.0,
    ),
)


def abstract_arguments(shape: Shape) -> dict[str, jax.ShapeDtypeStruct | None]:
    """Arguments of `losses_and_gradients` without values."""
    draft_vocab = shape.draft_vocab or shape.vocab
    head = (shape.target_hidden, shape.vocab)
    pruned = shape.draft_vocab is not None
    return {
        "draft_hidden": jax.ShapeDtypeStruct((shape.rows, shape.hidden), shape.dtype),
        "draft_head": jax.ShapeDtypeStruct((shape.hidden, draft_vocab), shape.dtype),
        "target_hidden": jax.ShapeDtypeStruct((shape.rows, shape.target_hidden), shape.dtype),
        "target_head": jax.ShapeDtypeStruct(head[::-1] if shape.tied else head, shape.dtype),
        "draft_token_ids": jax.ShapeDtypeStruct((draft_vocab,), jnp.int32) if pruned else None,
        "weights": jax.ShapeDtypeStruct((shape.rows,), jnp.float32),
        "target_argmax": jax.ShapeDtypeStruct((shape.rows,), jnp.int32) if pruned else None,
    }


def random_arguments(shape: Shape, seed: int) -> dict[str, Array | None]:
    """Arguments of `losses_and_gradients`; draft columns spread over the vocabulary."""
    key = jax.random.key(seed)
    arguments = {}
    for index, (name, leaf) in enumerate(abstract_arguments(shape).items()):
        if leaf is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
            values = jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)
            scale = 0.05 if name.endswith("head") else 1.0
            arguments[name] = values * jnp.asarray(scale, leaf.dtype)
        else:
            arguments[name] = None
    arguments["weights"] = jnp.ones((shape.rows,), jnp.float32)
    if shape.draft_vocab is not None:
        step = shape.vocab // shape.draft_vocab
        ids = jnp.arange(shape.draft_vocab, dtype=jnp.int32) * step
        arguments["draft_token_ids"] = ids
        arguments["target_argmax"] = ids[jnp.arange(shape.rows) % shape.draft_vocab]
    return arguments


def losses_and_gradients(shape: Shape, arguments: dict[str, Array | None], **options):
    """What a training step asks for: gradients by hidden states and head, and the metrics."""
    from pallas_kernels.vocab_loss import vocab_loss

    rest = {k: x for k, x in arguments.items() if k not in ("draft_hidden", "draft_head")}

    def total(draft_hidden, draft_head):
        found = vocab_loss(
            draft_hidden,
            draft_head,
            **rest,
            loss=shape.loss,
            target_soft_cap=shape.soft_cap,
            target_head_transposed=shape.tied,
            head_trainable=shape.head_trainable,
            **options,
        )
        return found.loss_sum, found

    gradients, found = jax.grad(total, argnums=(0, 1), has_aux=True)(
        arguments["draft_hidden"], arguments["draft_head"]
    )
    return found, gradients if shape.head_trainable else gradients[:1]
