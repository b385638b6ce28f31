"""The P-EAGLE objective by a dense mask over all sampled elements: the oracle of the structure.

Elements are (anchor, depth) pairs; the mask is the papers' predicate, written out; logits are full
arrays and autodiff does the rest.
"""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models.layers import attention_inputs, attention_output, attention_scale, mlp_block
from peagle_jax.models.primitives import norm
from train.parameters import build_drafter


def elements(lengths):
    """Anchors and depths of a draw, depth 0 of every row first."""
    pairs = [(a, 0) for a in range(len(lengths))]
    pairs += [(a, d) for a, n in enumerate(lengths) for d in range(1, n + 1)]
    return np.array(pairs, np.int32).T


def visible(anchors, depths, documents, window):
    """allowed[query, key] of the papers' predicate."""
    a, d, doc = anchors, depths, documents[anchors]
    prefix = (d[None, :] == 0) & (a[None, :] <= a[:, None])
    if window is not None:
        # A rollout belongs to its anchor, whatever the window.
        near = a[None, :] > a[:, None] + d[:, None] - window
        prefix &= near | ((a[None, :] == a[:, None]) & (d[:, None] > 0))
    own = (a[None, :] == a[:, None]) & (d[None, :] <= d[:, None])
    return (doc[:, None] >= 0) & (doc[:, None] == doc[None, :]) & (prefix | own)


def hidden_states(config, params, row, anchors, depths, documents):
    """Hidden states behind the final norm, [M, H], of one sequence's elements."""
    drafter = build_drafter(config, params, jnp.float32)
    is_mask = jnp.asarray(depths > 0)
    tokens = jnp.where(is_mask, config.mask_token_id, row.tokens[anchors])
    x = jnp.where(is_mask[:, None], drafter.fused_mask()[None], drafter.fuse(row.taps)[anchors])
    x, embedded = x[None], drafter.embed(tokens)[None]
    positions = (row.positions[anchors] + depths)[None]
    for index, layer in enumerate(drafter.layers):
        if index == 0:
            read, residual = layer.inputs(embedded, x)
        else:
            read, residual = norm(x, layer.attention_norm, layer.options), x
        q, k, v = attention_inputs(layer, read, positions)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * attention_scale(layer)
        allowed = visible(anchors, depths, documents, layer.layer.window)
        scores = jnp.where(jnp.asarray(allowed)[None, None, None], scores, -1e30)
        weights = jnp.where(
            jnp.asarray(allowed.any(-1))[None, None, None, :, None], jax.nn.softmax(scores), 0.0
        )
        out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
        x = residual + attention_output(layer, out)
        x = x + mlp_block(layer, norm(x, layer.mlp_norm, layer.options), positions)
    return drafter.finish(x)[0]


def loss_and_hits(config, params, row, matrix, kept, anchors, depths, documents):
    """KL summed over supervised elements, and which elements are correct, bool [M].

    matrix: the target's head [Ht, V]; kept: target id of each draft id.
    """
    hidden = hidden_states(config, params, row, anchors, depths, documents)
    rows = anchors + depths
    full = row.last_hidden[rows] @ matrix
    target = jax.nn.log_softmax(full[:, kept])
    draft = jax.nn.log_softmax(hidden @ params["head"])
    divergence = jnp.sum(jnp.exp(target) * (target - draft), -1)
    supervised = row.loss_mask[rows]
    hits = kept[jnp.argmax(draft, -1)] == jnp.argmax(full, -1)
    return jnp.sum(jnp.where(supervised, divergence, 0.0)), hits & supervised
