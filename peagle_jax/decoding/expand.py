"""The rows of one draft pass, from the rows that the target just verified.

Of the K + 1 rows that the target checked, `num_valid` hold committed tokens. Each gives a draft
row that pairs the *next* token with that row's hidden state: ids are shifted left by one, positions
are not. For P-EAGLE, K - 1 mask rows follow at the next positions, then padding, so that every
request fits a tile of 2K rows; `pallas_kernels.expand_tile` builds it.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import ExpandedTile, KernelSharding, expand_tile


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


def draft_tile(
    tokens: Int[Array, "B S"],
    first_position: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    wanted: Int[Array, "B"],
    *,
    num_drafts: int,
    mask_token_id: int,
    sharding: KernelSharding | None = None,
) -> ExpandedTile:
    """The 2K rows of each request in a P-EAGLE pass; padding has position -1.

    Args:
      tokens: committed tokens by position; token p + 1 is the id of the row at position p.
      first_position: position of the first verified row.
      num_valid: verified rows that hold committed tokens, 0 (a request that is idle) to K + 1.
      wanted: drafts of this round; a request that wants none still runs its valid rows, or its
        draft cache would have holes, and one that wants d has d - 1 mask rows.
      num_drafts: K.
    """
    steps = jnp.arange(num_drafts + 1, dtype=first_position.dtype)[None, :]
    verified = token_at(tokens, first_position[:, None] + steps)
    newest = token_at(tokens, (first_position + num_valid)[:, None])[:, 0]
    tile = expand_tile(
        verified,
        first_position,
        newest,
        num_valid,
        mask_token_id=mask_token_id,
        sharding=sharding,
    )
    index = jnp.arange(2 * num_drafts, dtype=num_valid.dtype)[None, :]
    unwanted = tile.is_mask & (index >= (num_valid + jnp.maximum(wanted - 1, 0))[:, None])
    return dataclasses.replace(
        tile,
        positions=jnp.where(unwanted, -1, tile.positions),
        is_mask=tile.is_mask & ~unwanted,
    )


def token_at(tokens: Int[Array, "B S"], positions: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Tokens at these positions; 0 for a position outside the buffer."""
    inside = (positions >= 0) & (positions < tokens.shape[1])
    found = jnp.take_along_axis(tokens, jnp.where(inside, positions, 0), axis=1)
    return jnp.where(inside, found, 0)
