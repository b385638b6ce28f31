"""One small training batch with everything in it: packed documents, padding, prompts, a window."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models.drafter import init_drafter
from tests.models.drafter_configs import small_drafter
from train.parameters import Trained, parameters_of, split
from train.rows import TargetHead, TrainingRows, draw
from train.sampling import CodConfig, count_table

NUM_DEPTHS = 4
# Rows of each document, per sequence; what is left of the 24 rows is padding.
DOCUMENTS = ((9, 10), (21,))
NUM_ROWS = 24
# A seed under which drafter and target agree at several depths of a rollout.
LABELS = 93
COD = CodConfig(num_depths=NUM_DEPTHS, ratio=0.8)


def make_case(seed=0, trained=Trained(head=True), **changes):  # noqa: B008 (frozen)
    """Config, learned, frozen, head, rows and lengths of a draw."""
    config = small_drafter(windows=(None, 6), **changes)
    drafter = init_drafter(config, jax.random.key(seed))
    learned, frozen = split(config, parameters_of(drafter), trained, jnp.float32)
    rng = np.random.default_rng(seed)
    batch = len(DOCUMENTS)
    ids = np.full((batch, NUM_ROWS), -1, np.int32)
    positions = np.zeros((batch, NUM_ROWS), np.int32)
    for b, lengths in enumerate(DOCUMENTS):
        at = 0
        for number, length in enumerate(lengths):
            ids[b, at : at + length] = number
            positions[b, at : at + length] = np.arange(length)
            at += length
    mask = (rng.random((batch, NUM_ROWS)) < 0.8) & (ids >= 0)
    rows = TrainingRows(
        tokens=jnp.asarray(rng.integers(0, 31, (batch, NUM_ROWS)), jnp.int32),
        taps=jnp.asarray(rng.standard_normal((batch, NUM_ROWS, 36)), jnp.float32),
        last_hidden=jnp.asarray(rng.standard_normal((batch, NUM_ROWS, 12)), jnp.float32),
        loss_mask=jnp.asarray(mask),
        document_ids=jnp.asarray(ids),
        positions=jnp.asarray(positions),
    )
    # A few loud tokens on both sides, so that drafter and target agree now and then.
    kept = jnp.arange(20, dtype=jnp.int32) + frozen["d2t"]
    part = learned if "head" in learned else frozen
    part["head"] = part["head"].at[:, :2].multiply(8.0)
    matrix = rng.standard_normal((12, 32)).astype(np.float32)
    outside = np.setdiff1d(np.arange(32), np.asarray(kept))[:1]
    matrix[:, np.concatenate([np.asarray(kept)[:2], outside])] *= 8.0
    matrix = jnp.asarray(matrix)
    last_hidden = np.random.default_rng(LABELS).standard_normal((batch, NUM_ROWS, 12))
    rows = rows._replace(last_hidden=jnp.asarray(last_hidden, jnp.float32))
    head = TargetHead(matrix=matrix, of_draft=matrix[:, kept])
    table = jnp.asarray(count_table(COD, NUM_ROWS))
    numbers = jnp.arange(batch, dtype=jnp.int32)
    lengths = draw(jax.random.key(7), numbers, rows.loss_mask, rows.document_ids, table)
    return config, learned, frozen, head, rows, lengths
