"""`document_attention`: causal attention within packed documents, for the depth-0 rows.

The JAX it stands for, per query head:

    allowed = (id_i == id_j) & (id_i >= 0) & (j <= i) [& (j > i - window)]
    out = softmax(where(allowed, scale * q @ k.T, -inf)) @ v

Neither direction holds anything of size n x n.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_arrays
from pallas_kernels.dispatch import Implementation
from pallas_kernels.interval_attention.api import interval_attention
from pallas_kernels.interval_attention.intervals import document_intervals


def document_attention(
    q: Float[Array, "B n N D"],
    k: Float[Array, "B n KV D"],
    v: Float[Array, "B n KV D"],
    document_ids: Int[Array, "B n"],
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B n N D"]:
    """Attention of every row to the rows of its document up to itself.

    Args:
      q, k, v: one dtype (float32 or bfloat16); query head h uses key-value head h // (N // KV).
      document_ids: a document is a run of equal ids; -1 marks padding rows.
      scale: factor on the scores, usually D ** -0.5.
      window: keys a row sees at most, itself included; None for all.
      implementation: see `pallas_kernels.dispatch`.

    Returns: [B, n, N, D] in q's dtype, accumulated in float32. Padding rows give zeros and neither
    receive nor send gradients.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a row sees at least itself; use None for no window")
    check_arrays("document_attention", q=(q, (None,) * 4, "floating"))
    check_arrays(
        "document_attention",
        k=(k, (*q.shape[:2], None, q.shape[3]), None),
        document_ids=(document_ids, q.shape[:2], "integer"),
    )
    first, last = document_intervals(document_ids, window)
    out, _ = interval_attention(
        q, k, v, first, last, scale=scale, implementation=implementation, name="document_attention"
    )
    return out
