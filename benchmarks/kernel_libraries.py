"""The nearest kernels of libraries, for comparison: jax.nn (cuDNN on GPUs), tokamax, torch.

None is needed: a library that is missing, or refuses a shape, raises with the reason. On a CPU the
same calls run by way of XLA or torch's CPU kernels, so that they cannot rot.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_loss import shapes as vocab_shapes


@dataclasses.dataclass(frozen=True)
class Library:
    """One contender.

    Attributes:
      call: function of the case's arguments. Of torch: it prepares tensors from them and returns a
        function without arguments, which is what is timed.
      same: the part of the reference's result that it computes too; None where it does other work,
        being the nearest that there is.
      torch: whether it is one of torch.
    """

    call: Callable[..., Any]
    same: Callable[[Any], Any] | None = lambda result: result
    torch: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """Attention with an explicit mask [B, 1, rows, keys], causal without one.

    query [B, T, N, D]; keys and values [B, S, KV, D].
    """

    query: Any
    keys: Any
    values: Any
    mask: Any
    scale: float
    soft_cap: float | None


def load(name: str):
    """The module `name`; NotImplementedError that says how to get it where it is missing."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise NotImplementedError(f"{package} is not installed (pip install {package})")
    return importlib.import_module(name)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def to_torch(tree):
    """The arrays of a tree as torch tensors on the same device, sharing memory."""
    torch = load("torch")
    if _on_gpu() and not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA; install a CUDA build of torch")
    return jax.tree.map(torch.from_dlpack, tree)


# --- attention ----------------------------------------------------------------------------------


def attention(dense: Callable[..., Dense], *, sinks: bool = False) -> Mapping[str, Library]:
    """All three on what `dense` makes of the arguments. None knows sinks: these are left out."""

    def jax_options(x: Dense) -> dict[str, Any]:
        """What jax.nn and tokamax name alike."""
        return {"mask": x.mask, "is_causal": x.mask is None, "scale": x.scale}

    def jax_nn(*arguments):
        x = dense(*arguments)
        if x.soft_cap is not None:
            raise NotImplementedError("jax.nn.dot_product_attention has no soft cap")
        return jax.nn.dot_product_attention(
            *(x.query, x.keys, x.values),
            **jax_options(x),
            implementation="cudnn" if _on_gpu() else "xla",
        )

    def tokamax(*arguments):
        x = dense(*arguments)
        return load("tokamax").dot_product_attention(
            *(x.query, x.keys, x.values),
            **jax_options(x),
            logits_soft_cap=x.soft_cap,
            # Its XLA form makes all scores at once: on a GPU it must be a kernel or refuse.
            implementation=("mosaic", "triton") if _on_gpu() else "xla",
        )

    def torch(*arguments):
        # The mask is made by jax, once per argument set: only the attention is timed.
        x = dense(*arguments)
        if x.soft_cap is not None:
            raise NotImplementedError("torch's scaled_dot_product_attention has no soft cap")
        arrays = to_torch([x.query, x.keys, x.values])
        query, keys, values = (array.transpose(1, 2) for array in arrays)
        mask = None if x.mask is None else to_torch(x.mask)
        return lambda: (
            load("torch.nn.functional")
            .scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=x.scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
            .transpose(1, 2)
        )

    same = None if sinks else (lambda out: out)
    return {
        "jax.nn": Library(jax_nn, same),
        "tokamax": Library(tokamax, same),
        "torch": Library(torch, same, torch=True),
    }


# --- hidden states and losses -------------------------------------------------------------------


def torch_fill() -> Library:
    """Two operations of torch, each over all rows."""

    def fill(*arguments):
        torch = load("torch")
        hidden, mask_hidden, source, is_mask = to_torch(arguments)

        def call():
            rows = hidden[source.clamp(0, len(hidden) - 1)]
            rows = torch.where((source >= 0)[:, None], rows, 0)
            return torch.where(is_mask[:, None], mask_hidden[None], rows)

        return call

    return Library(fill, torch=True)


def vocab_loss(shape: vocab_shapes.Shape) -> Mapping[str, Library]:
    """torch's dense losses, and tokamax's cross entropy of the draft head alone."""

    def tokamax(arguments):
        x = arguments
        labels = jnp.arange(shape.rows, dtype=jnp.int32) % x["draft_head"].shape[1]

        def total(hidden, head):
            return load("tokamax").linear_softmax_cross_entropy_loss(
                hidden, labels, head, implementation="chunked_xla"
            )

        return jax.value_and_grad(total, argnums=(0, 1))(x["draft_hidden"], x["draft_head"])

    def torch(arguments):
        if shape.loss != "kl":
            raise NotImplementedError(f"torch has no {shape.loss} loss")
        functional = load("torch.nn.functional")
        x = to_torch({name: array for name, array in arguments.items() if array is not None})
        hidden = x["draft_hidden"].clone().requires_grad_()
        head = x["draft_head"].clone().requires_grad_(shape.head_trainable)
        ids = x.get("draft_token_ids")

        def call():
            target_head = x["target_head"] if shape.tied else x["target_head"].T
            target_head = target_head if ids is None else target_head[ids]
            target = functional.linear(x["target_hidden"], target_head).float()
            if shape.soft_cap is not None:
                target = shape.soft_cap * (target / shape.soft_cap).tanh()
            draft = (hidden @ head).float()
            losses = functional.kl_div(
                draft.log_softmax(1), target.log_softmax(1), reduction="none", log_target=True
            ).sum(1)
            hidden.grad = head.grad = None
            (losses * x["weights"]).sum().backward()
            return losses.detach(), hidden.grad

        return call

    return {
        # Hard cross entropy, and no product with the target's head.
        "tokamax": Library(tokamax, same=None),
        "torch": Library(torch, lambda out: (out[0].row_losses, out[1][0]), torch=True),
    }
