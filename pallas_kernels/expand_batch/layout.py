"""Names of the expansion: the drafting methods, the cache's slots, the expanded batch."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How a drafter's input differs from the target's.

    Attributes:
      shift: the drafter is fed hidden states, so ids are shifted left by one against them (EAGLE);
        False for drafters that read tokens alone.
      sampled_rows: rows of each request whose logits give draft tokens: the new token's row and the
        mask rows behind it.
    """

    shift: bool
    sampled_rows: int

    @property
    def new_rows(self) -> int:
        """By how many rows each request grows."""
        return self.sampled_rows - (1 if self.shift else 0)


def drafting_method(name: str, num_speculative_tokens: int) -> Method:
    """The layout of "p_eagle", "eagle3", "draft_model" or "pard" for K draft tokens.

    Raises: ValueError for another name, or for less than one draft token.
    """
    methods = {
        "p_eagle": Method(shift=True, sampled_rows=num_speculative_tokens),
        "eagle3": Method(shift=True, sampled_rows=1),
        "draft_model": Method(shift=False, sampled_rows=1),
        "pard": Method(shift=False, sampled_rows=num_speculative_tokens),
    }
    if name not in methods:
        raise ValueError(f"unknown drafting method {name!r}; choose one of {', '.join(methods)}")
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens must be at least 1, got {num_speculative_tokens}")
    return methods[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Where a position of a request lies in the flat cache.

    Attributes:
      page_size: positions in a page of a block table; of a contiguous cache, slots of a request.
      num_slots: slots of the whole cache. The slot of a row that must not be written is this
        number: out of range, so that a scatter with mode="drop" drops it (-1 would wrap).
      max_length: positions at or past it are not written.
    """

    page_size: int
    num_slots: int
    max_length: int

    def __post_init__(self):
        if min(self.page_size, self.num_slots, self.max_length) < 1:
            raise ValueError(f"every size of a cache layout must be positive: {self}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedBatch:
    """The drafter's input: M rows, request after request, then padding.

    Attributes:
      token_ids: ids; the padding id in rejected and padding rows.
      positions: absolute positions, not shifted; the padding position in rejected and padding rows.
      is_rejected: rows that stand for rejected draft tokens, and padding rows.
      is_mask: mask rows.
      sample_rows: E rows of each request whose logits give its draft tokens, request by request.
        Those of a request without valid rows point at a rejected row.
      query_start_loc: first row of each request, and the end of the last.
      source_rows: the target row whose hidden state a row carries, -1 for none; None without shift.
      hidden_rows: for each target row, the row that it goes to; M for rows of no request. None
        without shift. (Rows of rejected tokens land on mask or rejected rows, as in public servers;
        `source_rows` is the map that needs no overwriting.)
      slots: flat cache slot of each row, `num_slots` where nothing may be written; None without a
        cache layout.
    """

    token_ids: Int[Array, "M"]
    positions: Int[Array, "M"]
    is_rejected: Bool[Array, "M"]
    is_mask: Bool[Array, "M"]
    sample_rows: Int[Array, "BE"]
    query_start_loc: Int[Array, "B_plus_1"]
    source_rows: Int[Array, "M"] | None
    hidden_rows: Int[Array, "T"] | None
    slots: Int[Array, "M"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedTile:
    """The drafter's input of a decoding round, 2K rows per request; row numbers within the request.

    Attributes:
      token_ids: a copied ids, the new token, K-1 mask tokens, padding.
      positions: absolute positions; -1 in padding rows.
      is_mask: mask rows.
      source_rows: the verified row whose hidden state a row carries, -1 for none.
      sample_rows: the K rows whose logits give the draft tokens.
    """

    token_ids: Int[Array, "B M"]
    positions: Int[Array, "B M"]
    is_mask: Bool[Array, "B M"]
    source_rows: Int[Array, "B M"]
    sample_rows: Int[Array, "B K"]
