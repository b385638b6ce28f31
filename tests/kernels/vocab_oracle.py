"""The vocabulary loss in float64 NumPy: dense softmaxes, one row at a time in meaning."""

import numpy as np


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def evaluate(h, w_draft, g, w_target, ids, weights, *, loss, cap=None, outside="renormalise"):
    """Dictionary of everything `vocab_loss` returns, and d_hidden and d_head of its sum.

    w_target is [Ht, V]; ids [Vd] (None: the same vocabulary). All arrays float64 or made so.
    """
    h, w_draft, g, w_target = (np.asarray(x, np.float64) for x in (h, w_draft, g, w_target))
    weights = np.asarray(weights, np.float64).copy()
    used = weights != 0
    h, g = np.where(used[:, None], h, 0.0), np.where(used[:, None], g, 0.0)
    full = g @ w_target
    if cap is not None:
        full = cap * np.tanh(full / cap)
    ids = np.arange(w_draft.shape[1]) if ids is None else np.asarray(ids)
    best = full.argmax(1)
    inside = np.isin(best, ids)
    if outside == "drop":
        weights[~inside] = 0.0
    z = h @ w_draft
    q, p = softmax(z), softmax(full[:, ids])
    rows = np.arange(len(h))
    acceptance = np.minimum(p, q).sum(1)
    kl = (p * (np.log(p) - np.log(q))).sum(1)
    label = full[:, ids].argmax(1)
    onehot = np.eye(len(ids))[label]

    # d loss / d q goes through the softmax; q - p is written where it is the closed form.
    def through_softmax(d_q):
        return q * (d_q - (q * d_q).sum(1, keepdims=True))

    overlap = through_softmax((q < p).astype(float))
    if loss == "kl":
        losses, dz = kl, q - p
    elif loss == "soft_ce":
        losses, dz = -(p * np.log(q)).sum(1), q - p
    elif loss == "ce":
        losses, dz = -np.log(q[rows, label]), q - onehot
    elif loss == "tv":
        losses, dz = 0.5 * np.abs(p - q).sum(1), -overlap
    elif loss == "nla":
        losses, dz = -np.log(acceptance), -overlap / acceptance[:, None]
    else:
        mix = np.exp(-3.0 * acceptance)[:, None]
        losses = mix[:, 0] * kl + (1 - mix[:, 0]) * (1 - acceptance)
        dz = mix * (q - p) - (1 - mix) * overlap
    dz = weights[:, None] * dz
    live = weights != 0
    return {
        "loss_sum": (weights * losses).sum(),
        "weight_sum": weights.sum(),
        "row_losses": np.where(live, losses, 0.0),
        "acceptance": np.where(live, acceptance, 0.0),
        "agreement": ids[z.argmax(1)] == best,
        "target_argmax": best,
        "in_draft_vocabulary": inside,
        "d_hidden": dz @ w_draft.T,
        # What is added up in d_hidden, and the logits: how well conditioned the question is.
        "d_hidden_terms": np.abs(dz) @ np.abs(w_draft.T),
        "largest_logit": max(np.abs(z).max(), np.abs(full).max()),
        "d_head": h.T @ dz,
    }
