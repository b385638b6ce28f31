"""Conditional drop-token (COD) sampling: which rollouts a training sequence keeps, and how deep.

Depth 0 keeps every row. At depth d >= 1 an anchor a (the depth-0 row a rollout starts from) stays
alive only if it was alive at depth d - 1, so a draw is fully described by one number per anchor,
the length of its rollout: anchor a has the mask rows (a, 1) .. (a, lengths[a]), and
alive_d = lengths >= d.

Eligible at depth d: alive at depth d - 1 (every row of a document at depth 0), and row a + d
exists, is supervised and lies in the same document. The anchor itself need not be supervised. Of
the eligible, min(#eligible, floor((n_valid - d) * max(r^d, r_min))) are kept, uniformly without
replacement; n_valid counts the supervised rows of the sequence. The counts are read from an integer
table made on the host in exact arithmetic, because float32 floors are off by one now and then.
With r = 1 (validation) nothing is dropped. (P-EAGLE, arXiv 2602.01469, section on COD.)

Shapes are static: the table bounds every count, `max_mask_rows` their sum.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

MAX_DEPTHS = 32
_INT64_SAFE = 2**62

Ratio = int | float | str | Fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodConfig:
    """How many rollout rows to keep.

    Attributes:
        num_depths: depths trained, depth 0 included (K_train).
        ratio: r, the share of rows kept from each depth to the next; 1 keeps all of them.
        min_ratio: r_min, a floor under r^d; 0, the paper's choice, means none.
    """

    num_depths: int = 8
    ratio: Ratio = 0.8
    min_ratio: Ratio = 0.0

    def __post_init__(self):
        if not 1 <= self.num_depths <= MAX_DEPTHS:
            raise ValueError(f"num_depths is {self.num_depths}; it must be 1 to {MAX_DEPTHS}.")
        if not 0 < exact(self.ratio) <= 1:
            raise ValueError(f"ratio is {self.ratio}; it must be above 0 and at most 1.")
        if not 0 <= exact(self.min_ratio) <= 1:
            raise ValueError(f"min_ratio is {self.min_ratio}; it must be between 0 and 1.")

    @property
    def keeps_all(self) -> bool:
        return exact(self.ratio) == 1

    def depth_ratio(self, depth: int) -> Fraction:
        """max(r^d, r_min) as an exact fraction."""
        return max(exact(self.ratio) ** depth, exact(self.min_ratio))


def exact(value: Ratio) -> Fraction:
    """The decimal that a person wrote: 0.8 is 4/5, not the nearest binary float."""
    return Fraction(str(value))


def count_table(config: CodConfig, num_rows: int) -> np.ndarray:
    """Rows to keep at depth d of a sequence with v supervised rows, int32 [K, num_rows + 1].

    Entry [d, v] is floor(max(0, v - d) * max(r^d, r_min)); row 0 is v itself and only there so that
    depths index the table. With r = 1 every entry is v, which no number of eligible rows exceeds.
    """
    supervised = np.arange(num_rows + 1, dtype=np.int64)
    table = np.empty((config.num_depths, num_rows + 1), np.int32)
    for depth in range(config.num_depths):
        if config.keeps_all:
            table[depth] = supervised
            continue
        share = config.depth_ratio(depth)
        below = np.maximum(supervised - depth, 0)
        if num_rows * share.numerator >= _INT64_SAFE or share.denominator >= _INT64_SAFE:
            below = below.astype(object)
        table[depth] = below * share.numerator // share.denominator
    return table


def max_mask_rows(config: CodConfig, num_rows: int, num_supervised: int | None = None) -> int:
    """Upper bound on the mask rows of any draw: the sum of the counts of depths 1 .. K-1.

    Args:
        num_rows: rows of the sequence.
        num_supervised: supervised rows, where the host knows them; all of them otherwise.
    """
    supervised = num_rows if num_supervised is None else num_supervised
    if not 0 <= supervised <= num_rows:
        raise ValueError(f"{supervised} supervised rows in a sequence of {num_rows}.")
    total = 0
    for depth in range(1, config.num_depths):
        share = Fraction(1) if config.keeps_all else config.depth_ratio(depth)
        # A chain of depth d ends on a supervised row that has d rows before it.
        most = min(supervised, max(0, num_rows - depth))
        total += most if config.keeps_all else int(max(0, supervised - depth) * share)
    return total


def rollout_limits(
    loss_mask: Bool[Array, "n"], document_ids: Int32[Array, "n"], num_depths: int
) -> Int32[Array, "n"]:
    """Longest rollout that each anchor may have, 0 .. num_depths - 1.

    This is also the full draw (r = 1): every chain of supervised rows of one document.
    """
    rows = loss_mask.shape[0]
    chain = document_ids >= 0
    limits = jnp.zeros((rows,), jnp.int32)
    for depth in range(1, num_depths):
        if depth >= rows:
            break
        continues = loss_mask[depth:] & (document_ids[depth:] == document_ids[:-depth])
        chain = chain & jnp.concatenate([continues, jnp.zeros((depth,), bool)])
        limits += chain.astype(jnp.int32)
    return limits


def sample_rollouts(
    key: Array,
    loss_mask: Bool[Array, "n"],
    document_ids: Int32[Array, "n"],
    table: Int32[Array, "K n1"],
) -> Int32[Array, "n"]:
    """One COD draw: the rollout length of every anchor.

    One random order of the anchors serves all depths: among the anchors kept at depth d - 1 the
    order is still uniform, so the first m eligible ones of it are a uniform choice of m.

    Args:
        key: typed PRNG key; the draw is a function of it and of the two masks alone.
        loss_mask: supervised rows, after the shift.
        document_ids: document of each row, negative for padding.
        table: `count_table(config, n)` as a device array.

    Raises:
        ValueError: the table was made for another number of rows.
    """
    rows = loss_mask.shape[0]
    if table.shape[1] != rows + 1:
        raise ValueError(
            f"the count table covers {table.shape[1] - 1} rows, the sequence has {rows}; "
            f"make it with count_table(config, {rows})."
        )
    num_depths = table.shape[0]
    limits = rollout_limits(loss_mask, document_ids, num_depths)
    supervised = jnp.sum(loss_mask & (document_ids >= 0), dtype=jnp.int32)

    order = jnp.argsort(jax.random.bits(key, (rows,), jnp.uint32))
    limits_in_order = limits[order]
    alive = jnp.ones((rows,), bool)
    kept = jnp.zeros((rows,), jnp.int32)
    for depth in range(1, num_depths):
        eligible = alive & (limits_in_order >= depth)
        rank = jnp.cumsum(eligible.astype(jnp.int32))
        alive = eligible & (rank <= table[depth, supervised])
        kept += alive.astype(jnp.int32)
    return jnp.zeros((rows,), jnp.int32).at[order].set(kept, unique_indices=True)


def alive_masks(lengths: Int32[Array, "n"], num_depths: int) -> Bool[Array, "K n"]:
    """alive[d, a]: anchor a has a row at depth d. Row 0 is all True."""
    depths = jnp.arange(num_depths, dtype=jnp.int32)
    return lengths[None, :] >= depths[:, None]


def lengths_from_elements(anchors: np.ndarray, depths: np.ndarray, num_rows: int) -> np.ndarray:
    """Rollout lengths, int32 [num_rows], of a draw given as (anchor, depth) pairs in any order.

    Raises:
        ValueError: a negative or too large anchor or row, a pair given twice, or a rollout that
            misses a depth (a draw must be nested).
    """
    anchors = np.asarray(anchors, np.int64).reshape(-1)
    depths = np.asarray(depths, np.int64).reshape(-1)
    if anchors.shape != depths.shape:
        raise ValueError(f"{anchors.size} anchors, but {depths.size} depths.")
    for anchor, depth in zip(anchors, depths, strict=True):
        if anchor < 0 or depth < 0 or anchor + depth >= num_rows:
            raise ValueError(
                f"element (anchor {anchor}, depth {depth}) lies outside the {num_rows} rows."
            )
    of_rollouts = depths > 0
    anchors, depths = anchors[of_rollouts], depths[of_rollouts]
    lengths = np.zeros(num_rows, np.int32)
    np.maximum.at(lengths, anchors, depths.astype(np.int32))
    given = np.bincount(anchors, minlength=num_rows)
    distinct = np.unique(np.stack([anchors, depths]), axis=1).shape[1]
    if distinct != anchors.size:
        raise ValueError("an (anchor, depth) pair is given twice.")
    if (given != lengths).any():
        anchor = int(np.flatnonzero(given != lengths)[0])
        raise ValueError(
            f"the rollout of anchor {anchor} reaches depth {lengths[anchor]} with "
            f"{given[anchor]} rows; depths 1 to {lengths[anchor]} must all be there."
        )
    return lengths
