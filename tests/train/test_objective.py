"""The structured objective and Algorithm 1 against a dense mask, and what they count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.models.drafter import Drafter
from tests.train import dense_oracle
from tests.train.training_cases import COD, NUM_DEPTHS, NUM_ROWS, make_case
from train.objective import element_hidden, loss_sum, make_objective, value_and_grad
from train.parameters import Trained, build_drafter
from train.rows import chunk_rollouts
from train.sampling import CodConfig, count_table, sample_rollouts


@functools.cache
def oracle():
    """Loss sum, gradient by every parameter, and per sequence anchors, depths and hits."""
    config, learned, frozen, head, rows, lengths = make_case()
    kept = jnp.arange(20, dtype=jnp.int32) + frozen["d2t"]
    drawn = [dense_oracle.elements(np.asarray(own)) for own in lengths]

    documents = np.asarray(rows.document_ids)

    def loss(learned):
        total, hits = jnp.float32(0), []
        for b, (anchors, depths) in enumerate(drawn):
            row = jax.tree.map(lambda x, b=b: x[b], rows)
            added, found = dense_oracle.loss_and_hits(
                config, {**frozen, **learned}, row, head.matrix, kept, anchors, depths, documents[b]
            )
            total, hits = total + added, [*hits, found]
        return total, hits

    (total, hits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(learned)
    return float(total), grads, drawn, [np.asarray(h) for h in hits]


PARTITIONS = [
    pytest.param({"num_chunks": 1}, id="chunks-1", marks=pytest.mark.slow),
    pytest.param({"num_chunks": 2}, id="chunks-2"),
    pytest.param({"num_chunks": 4}, id="chunks-4", marks=pytest.mark.slow),
    pytest.param({"num_chunks": 7}, id="chunks-7", marks=pytest.mark.slow),
    pytest.param({"partition": "algorithm-1", "num_chunks": 1}, id="S-1", marks=pytest.mark.slow),
    pytest.param({"partition": "algorithm-1", "num_chunks": 2}, id="S-2"),
    pytest.param({"partition": "algorithm-1", "num_chunks": 4}, id="S-4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", PARTITIONS)
def test_loss_gradients_and_counts_equal_the_dense_mask(options):
    config, *arguments = make_case()
    rows, lengths = arguments[-2:]
    objective = make_objective(config, COD, NUM_ROWS, train_head=True, **options)
    sums, grads = jax.jit(functools.partial(value_and_grad, objective))(*arguments)
    total, wanted, drawn, hits = oracle()
    np.testing.assert_allclose(float(sums.loss), total, rtol=1e-5)
    assert set(grads) == set(wanted)
    for name, value in wanted.items():
        scale = float(jnp.linalg.norm(value))
        assert scale > 0, f"{name} takes no part"
        error = float(jnp.linalg.norm(grads[name] - value)) / scale
        assert error < 1e-5, f"{name}: {error}"
    mask, counts = np.asarray(rows.loss_mask), _counts(np.asarray(rows.loss_mask), drawn, hits)
    assert int(sums.count) == sum(int(mask[b][a + d].sum()) for b, (a, d) in enumerate(drawn))
    for name, value in counts.items():
        np.testing.assert_array_equal(np.asarray(getattr(sums, name)), value, err_msg=name)
    assert counts["correct"][1:].sum() > 0 and counts["joint_correct"][2] > 0


def test_training_the_mask_row_alone_gives_its_part_of_the_table_s_gradient():
    config, *arguments = make_case(trained=Trained(embedding="mask-row"))
    objective = make_objective(config, COD, NUM_ROWS, num_chunks=2)
    _, grads = jax.jit(functools.partial(value_and_grad, objective))(*arguments)
    wanted = oracle()[1]
    assert "embedding" not in grads and "head" not in grads, "both are frozen"
    scale = float(jnp.linalg.norm(wanted["embedding"][31]))
    assert float(jnp.linalg.norm(grads["mask_row"] - wanted["embedding"][31])) < 1e-5 * scale
    error = float(jnp.linalg.norm(grads["fc"] - wanted["fc"]))
    assert error < 1e-5 * float(jnp.linalg.norm(wanted["fc"]))


def _counts(mask, drawn, hits):
    """Per-depth and joint counts, element by element."""
    names = ("correct", "total", "joint_correct", "joint_total")
    counts = {name: np.zeros(NUM_DEPTHS, int) for name in names}
    for b, (anchors, depths) in enumerate(drawn):
        hit = {(a, d): h for a, d, h in zip(anchors, depths, hits[b], strict=True)}
        for (a, d), correct in hit.items():
            if not mask[b][a + d]:
                continue
            counts["total"][d] += 1
            counts["correct"][d] += correct
            if mask[b][a]:
                counts["joint_total"][d] += 1
                counts["joint_correct"][d] += all(hit[a, i] for i in range(d + 1))
    return counts


@functools.cache
def _hidden_program():
    config, *_ = make_case()
    objective = make_objective(config, COD, NUM_ROWS, num_chunks=2)
    return jax.jit(functools.partial(element_hidden, objective))


def test_documents_of_a_sequence_cannot_see_each_other():
    config, learned, frozen, _, rows, lengths = make_case()
    run = _hidden_program()
    stream, mask, chunks = run(learned, frozen, rows, lengths)
    second = (rows.document_ids == 1)[..., None]
    other = rows._replace(
        taps=jnp.where(second, 3.0 - rows.taps, rows.taps),
        tokens=jnp.where(second[..., 0], (rows.tokens + 5) % 31, rows.tokens),
    )
    changed, changed_mask, _ = run(learned, frozen, other, lengths)
    first = np.asarray(rows.document_ids == 0)
    np.testing.assert_array_equal(np.asarray(stream)[first], np.asarray(changed)[first])
    assert not np.array_equal(np.asarray(stream)[0, 9:19], np.asarray(changed)[0, 9:19])
    of_first = np.take_along_axis(first, np.asarray(chunks.anchors).reshape(2, -1), axis=1).reshape(
        chunks.anchors.shape
    ) & (np.asarray(chunks.depths) > 0)
    assert of_first.sum() > 10
    np.testing.assert_array_equal(np.asarray(mask)[of_first], np.asarray(changed_mask)[of_first])


def test_training_rows_are_what_one_drafting_pass_computes():
    # Full attention: a window counts the rollout's own rows at serving only.
    config, learned, frozen, _, rows, lengths = make_case()
    stream, mask, chunks = _hidden_program()(learned, frozen, rows, lengths)
    drafter = build_drafter(config, {**frozen, **learned}, jnp.float32)
    anchors, depths = np.asarray(chunks.anchors), np.asarray(chunks.depths)
    slot = (depths[0] > 0) & (np.asarray(rows.document_ids[0])[anchors[0]] == 0)
    starts = sorted({int(a) for a in anchors[0][slot] if a < 4})
    assert starts, "the window of the second layer is 6: prefixes of up to 4 + 3 rows fit it"
    served = _serve(drafter, rows, starts)
    compared = 0
    for index, anchor in enumerate(starts):
        ours = np.asarray(stream)[0, anchor]
        np.testing.assert_allclose(served[index, anchor], ours, atol=2e-5)
        for c, r in zip(*np.nonzero(slot & (anchors[0] == anchor)), strict=True):
            depth = depths[0, c, r]
            if anchor + depth < 6:
                found = np.asarray(mask)[0, c, r]
                np.testing.assert_allclose(served[index, anchor + depth], found, atol=2e-5)
                compared += 1
    assert compared >= 3


def _serve(drafter: Drafter, rows, starts):
    """Per anchor: rows 0..anchor of the first document, then K - 1 mask slots, causal."""
    width = max(starts) + NUM_DEPTHS
    at = np.arange(width)[None].repeat(len(starts), 0)
    real = at <= np.array(starts)[:, None]
    used = at < np.array(starts)[:, None] + NUM_DEPTHS
    row = np.where(real, at, 0)
    tokens = np.where(real, np.asarray(rows.tokens)[0][row], drafter.config.mask_token_id)
    fused = jnp.where(
        jnp.asarray(real)[..., None],
        drafter.fuse(rows.taps[0])[row],
        drafter.fused_mask()[None, None],
    )
    positions = jnp.asarray(np.where(used, at, -1), jnp.int32)
    return np.asarray(drafter(jnp.asarray(tokens, jnp.int32), fused, positions).hidden)


@functools.cache
def _loss_by_taps(outside):
    config, *_ = make_case()
    objective = make_objective(config, COD, NUM_ROWS, num_chunks=2, outside=outside)

    def run(taps, learned, frozen, head, rows, lengths):
        return loss_sum(objective, learned, frozen, head, rows._replace(taps=taps), lengths)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def test_a_batch_without_supervision_has_no_loss_and_no_gradient_E6():
    config, learned, frozen, head, rows, lengths = make_case()
    silent = rows._replace(loss_mask=jnp.zeros_like(rows.loss_mask))
    (total, sums), slope = _loss_by_taps("renormalise")(
        rows.taps, learned, frozen, head, silent, jnp.zeros_like(lengths)
    )
    assert float(total) == 0 and int(sums.count) == 0
    assert float(jnp.abs(slope).max()) == 0

    # A sequence without supervision beside one with it changes nothing for the other.
    mixed = rows._replace(loss_mask=rows.loss_mask.at[1].set(False))
    (total, sums), slope = _loss_by_taps("renormalise")(
        rows.taps, learned, frozen, head, mixed, lengths.at[1].set(0)
    )
    assert int(sums.count) > 0 and np.isfinite(float(total))
    assert float(jnp.abs(slope[1]).max()) == 0 and float(jnp.abs(slope[0]).max()) > 0


def test_supervised_rows_have_a_gradient_and_the_last_row_has_none_E3():
    _, learned, frozen, head, rows, lengths = make_case()
    # Document of 5 tokens, mask [0, 0, 1, 1, 1] before the shift: rows 1, 2, 3 are supervised.
    mask = jnp.zeros_like(rows.loss_mask).at[:, 1:4].set(True)
    ids = jnp.full_like(rows.document_ids, -1).at[:, :4].set(0)
    short = rows._replace(loss_mask=mask, document_ids=ids)
    (_, sums), slope = _loss_by_taps("renormalise")(
        rows.taps, learned, frozen, head, short, jnp.zeros_like(lengths)
    )
    size = np.abs(np.asarray(slope)).max(-1)
    assert int(sums.count) == 6
    assert (size[:, 4:] == 0).all() and (size[:, 1:4] > 0).all()


def test_target_tokens_that_were_stored_count_as_those_computed():
    config, learned, frozen, head, rows, lengths = make_case()
    objective = make_objective(config, COD, NUM_ROWS, num_chunks=2)
    run = jax.jit(functools.partial(loss_sum, objective))
    tokens = jnp.argmax(rows.last_hidden @ head.matrix, axis=-1).astype(jnp.int32)
    _, computed = run(learned, frozen, head, rows, lengths)
    _, stored = run(learned, frozen, head, rows._replace(target_tokens=tokens), lengths)
    jax.tree.map(np.testing.assert_array_equal, computed, stored)
    _, other = run(learned, frozen, head, rows._replace(target_tokens=tokens + 1), lengths)
    assert int(computed.correct.sum()) > int(other.correct.sum())


@pytest.mark.parametrize("outside", ["renormalise", "drop"])
def test_rows_whose_target_token_is_never_drafted_E15(outside):
    _, learned, frozen, head, rows, lengths = make_case()
    kept = np.arange(20) + np.asarray(frozen["d2t"])
    labels = np.asarray(rows.last_hidden @ head.matrix).argmax(-1)
    inside = np.isin(labels, kept)
    mask = np.asarray(rows.loss_mask)
    assert 5 < (mask & ~inside).sum() < mask.sum() - 5
    (total, sums), _ = _loss_by_taps(outside)(
        rows.taps, learned, frozen, head, rows, jnp.zeros_like(lengths)
    )
    expected = mask & inside if outside == "drop" else mask
    assert int(sums.count) == expected.sum()
    assert int(sums.total[0]) == mask.sum(), "a miss counts among the rows of the accuracy"
    lonely = rows._replace(loss_mask=jnp.asarray(expected))
    (wanted, _), _ = _loss_by_taps("renormalise")(
        rows.taps, learned, frozen, head, lonely, jnp.zeros_like(lengths)
    )
    np.testing.assert_allclose(float(total), float(wanted), rtol=1e-6)


@pytest.mark.parametrize("rows", [2048, 8192, 32768])
@pytest.mark.parametrize("supervised", [1.0, 0.5])
def test_at_most_a_tenth_of_the_visited_slots_is_padding(rows, supervised):
    config, *_ = make_case()
    cod = CodConfig(num_depths=8, ratio=0.8)
    plan = make_objective(config, cod, rows).chunks
    mask = jnp.asarray(np.arange(rows) >= rows * (1 - supervised))
    ids = jnp.zeros((rows,), jnp.int32)
    lengths = sample_rollouts(jax.random.key(0), mask, ids, jnp.asarray(count_table(cod, rows)))
    used = np.asarray(chunk_rollouts(lengths[None], plan).rows_used)[0]
    visited = (used > 0).sum() * plan.capacity
    assert used.sum() == int(lengths.sum()) and visited * 0.9 <= used.sum()


def test_impossible_settings_are_named():
    config, *_ = make_case()
    with pytest.raises(ValueError, match="structured or algorithm-1"):
        make_objective(config, COD, NUM_ROWS, partition="flat")
    with pytest.raises(ValueError, match="num_chunks"):
        make_objective(config, COD, NUM_ROWS, partition="algorithm-1")
