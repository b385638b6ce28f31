"""The rows of one parallel draft pass, from the rows that the target just verified.

Of the K + 1 rows that the target checked, `num_valid` hold committed tokens. Each gives a draft
row that pairs the *next* token with that row's hidden state: ids are shifted left by one, positions
are not. K - 1 mask rows follow at the next positions, then padding. Every request therefore fits a
tile of 2K rows. (The flat layout for mixed prefill and decode is `pallas_kernels.expand_batch`.)
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTile:
    """2K rows for each request.

    Attributes:
      ids: next tokens, mask ids, 0 in padding.
      positions: those of the hidden states; -1 in padding, so that nothing is written.
      is_mask: which rows get the learned hidden state.
      source_rows: the verified row whose hidden state a row carries; -1 for mask rows and padding.
      sample_rows: the row whose logits give each of the K drafts.
    """

    ids: Int[Array, "B M"]
    positions: Int[Array, "B M"]
    is_mask: Bool[Array, "B M"]
    source_rows: Int[Array, "B M"]
    sample_rows: Int[Array, "B K"]


def valid_rows(
    tokens: Int[Array, "B S"],
    first_position: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    num_rows: int,
) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
    """Ids and positions of `num_rows` rows from `first_position` on: row p holds token p + 1.

    Rows from `num_valid` on are padding (id 0, position -1).
    """
    steps = jnp.arange(num_rows, dtype=first_position.dtype)[None, :]
    positions = first_position[:, None] + steps
    real = steps < num_valid[:, None]
    ids = token_at(tokens, jnp.where(real, positions + 1, -1))
    return ids, jnp.where(real, positions, -1)


def expand_tile(
    tokens: Int[Array, "B S"],
    first_position: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    wanted: Int[Array, "B"],
    *,
    num_drafts: int,
    mask_token_id: int,
) -> DraftTile:
    """Build the tile of a P-EAGLE pass.

    Args:
      tokens: committed tokens by position; token p + 1 is the id of the row at position p.
      first_position: position of the first verified row.
      num_valid: verified rows that hold committed tokens, 0 (a request that is idle) to K + 1.
      wanted: drafts of this round; a request that wants none still runs its valid rows, or its
        draft cache would have holes, and one that wants d has d - 1 mask rows.
      num_drafts: K.
    """
    width = 2 * num_drafts
    steps = jnp.arange(width, dtype=first_position.dtype)[None, :]
    ids, positions = valid_rows(tokens, first_position, num_valid, width)
    last_mask = num_valid + jnp.maximum(wanted - 1, 0)
    is_mask = (steps >= num_valid[:, None]) & (steps < last_mask[:, None])
    is_mask = is_mask & (num_valid > 0)[:, None]
    first_sample = jnp.maximum(num_valid - 1, 0)[:, None]
    return DraftTile(
        ids=jnp.where(is_mask, mask_token_id, ids),
        positions=jnp.where(is_mask, first_position[:, None] + steps, positions),
        is_mask=is_mask,
        source_rows=jnp.where(steps < num_valid[:, None], steps, -1),
        sample_rows=first_sample + jnp.arange(num_drafts, dtype=first_sample.dtype)[None, :],
    )


def token_at(tokens: Int[Array, "B S"], positions: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Tokens at these positions; 0 for a position outside the buffer."""
    inside = (positions >= 0) & (positions < tokens.shape[1])
    found = jnp.take_along_axis(tokens, jnp.where(inside, positions, 0), axis=1)
    return jnp.where(inside, found, 0)
