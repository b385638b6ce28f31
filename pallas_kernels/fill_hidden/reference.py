"""What `fill_hidden` means, in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def fill_hidden_reference(
    hidden: Float[Array, "R H"],
    mask_hidden: Float[Array, "H"],
    source_rows: Int[Array, "M"],
    is_mask: Bool[Array, "M"],
) -> Float[Array, "M H"]:
    """`where(is_mask, mask_hidden, hidden[source_rows])`, zero where there is no such row."""
    exists = (source_rows >= 0) & (source_rows < hidden.shape[0])
    rows = hidden[jnp.where(exists, source_rows, 0)]
    rows = jnp.where(exists[:, None], rows, jnp.zeros((), hidden.dtype))
    return jnp.where(is_mask[:, None], mask_hidden[None, :], rows)
