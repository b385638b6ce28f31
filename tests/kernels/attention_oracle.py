"""Training attention by brute force: the dense visibility rule and float64 softmax, in NumPy."""

import dataclasses

import numpy as np

from tests.kernels.closeness import tolerance


@dataclasses.dataclass(frozen=True)
class Packing:
    """Rows of one training batch, as numpy arrays.

    Attributes:
      document_ids: [B, n], -1 for padding.
      anchors, depths, valid: [B, M].
    """

    document_ids: np.ndarray
    anchors: np.ndarray
    depths: np.ndarray
    valid: np.ndarray


def draw_packing(seed, *, n, lengths, num_depths, capacity, keep=0.7, skip=0.0):
    """Documents of `lengths` (per batch row), nested rollouts sorted by anchor, padding at the end.

    `skip` is the share of anchors without a rollout at the start of each document (a prompt).
    """
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    ids = np.full((batch, n), -1, np.int32)
    anchors = np.zeros((batch, capacity), np.int32)
    depths = np.zeros((batch, capacity), np.int32)
    valid = np.zeros((batch, capacity), bool)
    for b, sizes in enumerate(lengths):
        begin, at = 0, 0
        for document, size in enumerate(sizes):
            # Ids carry no order: a later document has a smaller one.
            ids[b, begin : begin + size] = len(sizes) - 1 - document
            for a in range(begin + int(size * skip), begin + size):
                deepest = 0
                while (
                    deepest + 1 < num_depths
                    and a + deepest + 1 < begin + size
                    and rng.random() < keep
                ):
                    deepest += 1
                if at + deepest > capacity:
                    break
                anchors[b, at : at + deepest] = a
                depths[b, at : at + deepest] = np.arange(1, deepest + 1)
                valid[b, at : at + deepest] = True
                at += deepest
            begin += size
    return Packing(ids, anchors, depths, valid)


def document_mask(document_ids, window=None):
    """[B, n, n]: query row, key row."""
    n = document_ids.shape[1]
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    same = (document_ids[:, :, None] == document_ids[:, None, :]) & (document_ids >= 0)[:, :, None]
    allowed = same & (j <= i)
    return allowed if window is None else allowed & (j > i - window)


def rollout_mask(packing, window=None):
    """[B, M, n + M]: keys are the prefix, then the mask rows. The papers' predicate by pair."""
    batch, n = packing.document_ids.shape
    rows = packing.anchors.shape[1]
    key_anchor = np.concatenate([np.broadcast_to(np.arange(n), (batch, n)), packing.anchors], 1)
    key_depth = np.concatenate([np.zeros((batch, n), int), packing.depths], 1)
    key_valid = np.concatenate([np.ones((batch, n), bool), packing.valid], 1)
    allowed = np.zeros((batch, rows, n + rows), bool)
    for b in range(batch):
        doc = packing.document_ids[b]
        for row in np.flatnonzero(packing.valid[b]):
            qa, qd = packing.anchors[b, row], packing.depths[b, row]
            ka, kd = key_anchor[b], key_depth[b]
            context = (kd == 0) & (ka <= qa)
            if window is not None:
                context &= ka > qa + qd - window
            own = (ka == qa) & (kd <= qd)
            allowed[b, row] = (
                (doc[qa] != -1) & (doc[ka] == doc[qa]) & (context | own) & key_valid[b]
            )
    return allowed


def attention(q, k, v, allowed, scale):
    """q [B, M, N, D], k and v [B, S, KV, D], allowed [B, M, S] -> out, lse [B, N, M], weights."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    scores = np.where(allowed[:, None], scale * np.einsum("bmnd,bsnd->bnms", q, k), -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + top[..., 0]
    p = weights / np.where(total > 0, total, 1.0)
    return np.einsum("bnms,bsnd->bmnd", p, v), lse, p


def attention_gradients(q, k, v, allowed, scale, d_out, d_lse=None):
    """Cotangents of q, k, v for cotangents of the output [B, M, N, D] and of the lse [B, N, M]."""
    out, _, p = attention(q, k, v, allowed, scale)
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    batch, keys, kv_heads, width = k.shape
    groups = q.shape[2] // kv_heads
    wide_k, wide_v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    d_p = np.einsum("bmnd,bsnd->bnms", d_out, wide_v)
    mean = np.einsum("bmnd,bmnd->bnm", d_out, out)
    if d_lse is not None:
        mean = mean - d_lse
    d_s = scale * p * (d_p - mean[..., None])
    d_q = np.einsum("bnms,bsnd->bmnd", d_s, wide_k)

    def folded(x):
        return x.reshape(batch, keys, kv_heads, groups, width).sum(3)

    d_k = folded(np.einsum("bnms,bmnd->bsnd", d_s, q))
    return d_q, d_k, folded(np.einsum("bnms,bmnd->bsnd", p, d_out))


def assert_close(found, expected, dtype, length, what=""):
    """Within the tolerance of a float64 oracle."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert np.all(np.isfinite(found)), what
    bound = tolerance(expected, length, dtype)
    error = np.max(np.abs(found - expected), initial=0.0)
    assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"
