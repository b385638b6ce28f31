"""`rollout_attention`: the mask rows' attention in P-EAGLE training.

Row (anchor a, depth d) sees depth-0 keys j of the anchor's document with j <= a, and the mask rows
of its own rollout of depth 1..d; one softmax runs over both, and no mask of rows x rows exists:

    scores = scale * q @ concat(prefix_k, own_k).T
    out = softmax(where(allowed, scores, -inf)) @ concat(prefix_v, own_v)

Layout of the mask rows: a rollout (the rows of one anchor) is contiguous, depths 1, 2, ..., r in
order, so the own keys of row i are rows i-d+1..i of the same arrays. Rollouts sorted by anchor make
the kernel skip: a tile of rows then needs only the key blocks between its smallest document start
and its largest anchor. Any order is right, sorted is fast. Padding rows (valid False) may stand
anywhere, best at the end.
"""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.checks import check_arrays
from pallas_kernels.dispatch import Implementation
from pallas_kernels.interval_attention.api import interval_attention
from pallas_kernels.interval_attention.intervals import rollout_intervals


def rollout_attention(
    q: Float[Array, "B M N D"],
    prefix_k: Float[Array, "B n KV D"],
    prefix_v: Float[Array, "B n KV D"],
    own_k: Float[Array, "B M KV D"],
    own_v: Float[Array, "B M KV D"],
    anchors: Int[Array, "B M"],
    depths: Int[Array, "B M"],
    valid: Bool[Array, "B M"],
    document_ids: Int[Array, "B n"],
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B M N D"]:
    """Attention of every mask row to its prefix and its rollout.

    Args:
      q, own_k, own_v: of the mask rows, rotated at position anchor + depth.
      prefix_k, prefix_v: of the depth-0 rows; gradients flow to them.
      anchors: depth-0 row from which the rollout starts, in 0..n-1.
      depths: 1 to 64.
      valid: False for padding rows, whose anchor and depth do not matter.
      document_ids: of the depth-0 rows; a document is a run of equal ids, -1 marks padding.
      scale: factor on the scores, usually D ** -0.5.
      window: limits the prefix to j > a + d - window; the anchor itself and the rollout are always
        seen. None for no limit.
      implementation: see `pallas_kernels.dispatch`.

    Returns: [B, M, N, D] in q's dtype, accumulated in float32. Rows that are not valid, or whose
    anchor lies in padding or outside 0..n-1, give zeros and neither receive nor send gradients.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}: it counts keys, at least 1; use None for no window")
    check_arrays("rollout_attention", q=(q, (None,) * 4, "floating"))
    rows = q.shape[:2]
    check_arrays(
        "rollout_attention",
        prefix_k=(prefix_k, (rows[0], None, None, q.shape[3]), None),
        anchors=(anchors, rows, "integer"),
        depths=(depths, rows, "integer"),
        valid=(valid, rows, "bool"),
        document_ids=(document_ids, prefix_k.shape[:2], "integer"),
    )
    first, last, own_first, own_last = rollout_intervals(
        anchors, depths, valid, document_ids, window
    )
    out, _ = interval_attention(
        q,
        prefix_k,
        prefix_v,
        first,
        last,
        (own_k, own_v, own_first, own_last),
        scale=scale,
        implementation=implementation,
        name="rollout_attention",
    )
    return out
