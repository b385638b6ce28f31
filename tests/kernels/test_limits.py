"""Arguments that do not fit are refused at the edge, with what was expected and what came, before a
kernel reads past the end of an array; and what is odd but allowed works."""

import functools

import jax
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import (
    CacheLayout,
    dispatch,
    document_attention,
    expand_batch,
    expand_tile,
    fill_hidden,
    rollout_attention,
    short_query_attention,
    vocab_loss,
)

FLOAT, INT, BOOL = np.float32, np.int32, np.bool_
# Arguments that fit: operation -> (function, name -> array or number).
OPERATIONS = {
    "expand_batch": (
        expand_batch,
        dict(
            token_ids=np.array([1, 2], INT),
            positions=np.array([0, 1], INT),
            next_token_ids=np.array([3], INT),
            query_start_loc=np.array([0, 2], INT),
            query_end_loc=np.array([1], INT),
            num_speculative_tokens=3,
            mask_token_id=9,
            cache=CacheLayout(page_size=4, num_slots=8, max_length=8),
            block_table=np.array([[0, 1]], INT),
        ),
    ),
    "expand_tile": (
        expand_tile,
        dict(
            token_ids=np.array([[1, 2, 3]], INT),
            start_positions=np.array([0], INT),
            next_token_ids=np.array([4], INT),
            num_valid=np.array([3], INT),
            mask_token_id=9,
        ),
    ),
    "fill_hidden": (
        fill_hidden,
        dict(
            hidden=np.ones((2, 3), FLOAT),
            mask_hidden=np.ones(3, FLOAT),
            source_rows=np.array([0, 1], INT),
            is_mask=np.zeros(2, BOOL),
        ),
    ),
    "short_query_attention": (
        short_query_attention,
        dict(
            query=np.ones((1, 2, 4, 8), FLOAT),
            keys=np.ones((1, 6, 2, 8), FLOAT),
            values=np.ones((1, 6, 2, 8), FLOAT),
            query_positions=np.array([[0, 1]], INT),
        ),
    ),
    "document_attention": (
        document_attention,
        dict(
            q=np.ones((1, 3, 4, 8), FLOAT),
            k=np.ones((1, 3, 2, 8), FLOAT),
            v=np.ones((1, 3, 2, 8), FLOAT),
            document_ids=np.zeros((1, 3), INT),
            scale=1.0,
        ),
    ),
    "rollout_attention": (
        rollout_attention,
        dict(
            q=np.ones((1, 2, 4, 8), FLOAT),
            prefix_k=np.ones((1, 3, 2, 8), FLOAT),
            prefix_v=np.ones((1, 3, 2, 8), FLOAT),
            own_k=np.ones((1, 2, 2, 8), FLOAT),
            own_v=np.ones((1, 2, 2, 8), FLOAT),
            anchors=np.array([[0, 1]], INT),
            depths=np.array([[1, 1]], INT),
            valid=np.ones((1, 2), BOOL),
            document_ids=np.zeros((1, 3), INT),
            scale=1.0,
        ),
    ),
    "vocab_loss": (
        vocab_loss,
        dict(
            draft_hidden=np.ones((3, 4), FLOAT),
            draft_head=np.ones((4, 5), FLOAT),
            target_hidden=np.ones((3, 6), FLOAT),
            target_head=np.ones((6, 9), FLOAT),
            draft_token_ids=np.arange(5, dtype=INT),
            weights=np.ones(3, FLOAT),
        ),
    ),
}
# Operation, what is changed, and what the message says.
REFUSED = [
    (
        "expand_batch",
        dict(token_ids=np.ones(2, FLOAT)),
        r"token_ids must be integer \[any\], got float",
    ),
    ("expand_batch", dict(positions=np.zeros(1, INT)), r"positions must be integer \[2\]"),
    ("expand_batch", dict(next_token_ids=np.zeros(0, INT)), r"next_token_ids must .* \[any\]"),
    ("expand_batch", dict(query_start_loc=np.zeros(1, INT)), r"query_start_loc must .* \[2\]"),
    ("expand_batch", dict(block_table=np.zeros((2, 2), INT)), r"block_table must be .* \[1, any\]"),
    ("expand_batch", dict(num_speculative_tokens=0), "at least 1, got 0"),
    ("expand_batch", dict(max_query_len=0), "max_query_len 0 leaves requests no row"),
    ("expand_tile", dict(num_valid=np.ones(2, INT)), r"num_valid must be integer \[1\]"),
    ("expand_tile", dict(token_ids=np.ones((1, 1), INT)), "hold no draft"),
    (
        "fill_hidden",
        dict(mask_hidden=np.ones(2, FLOAT)),
        r"mask_hidden must be \[3\], got float32 \[2",
    ),
    ("fill_hidden", dict(is_mask=np.zeros(1, BOOL)), r"is_mask must be bool \[2\]"),
    ("fill_hidden", dict(is_mask=np.zeros(2, INT)), r"is_mask must be bool \[2\], got int32 \[2\]"),
    (
        "fill_hidden",
        dict(source_rows=np.zeros(0, INT), is_mask=np.zeros(0, BOOL)),
        r"integer \[any\]",
    ),
    ("short_query_attention", dict(query=np.ones((2, 4, 8), FLOAT)), "query must be floating"),
    (
        "short_query_attention",
        dict(query_positions=np.ones((1, 2), FLOAT)),
        "positions must be integer",
    ),
    ("short_query_attention", dict(sinks=np.ones(3, FLOAT)), r"sinks must be floating \[4\]"),
    ("short_query_attention", dict(num_valid=np.ones(2, INT)), r"num_valid must be integer \[1\]"),
    ("document_attention", dict(v=np.ones((1, 3, 2, 4), FLOAT)), r"v must be \[1, 3, 2, 8\]"),
    ("document_attention", dict(k=np.ones((1, 5, 2, 8), FLOAT)), r"k must be \[1, 3, any, 8\]"),
    (
        "document_attention",
        dict(document_ids=np.zeros((1, 2), INT)),
        r"document_ids must .* \[1, 3\]",
    ),
    ("document_attention", dict(q=np.ones((1, 0, 4, 8), FLOAT)), r"q must be floating \[any, any"),
    (
        "rollout_attention",
        dict(own_k=np.ones((1, 1, 2, 8), FLOAT)),
        r"own_k must be \[1, 2, 2, 8\]",
    ),
    ("rollout_attention", dict(valid=np.ones((1, 2), INT)), r"valid must be bool \[1, 2\]"),
    ("rollout_attention", dict(depths=np.ones((1, 3), INT)), r"depths must be integer \[1, 2\]"),
    ("rollout_attention", dict(window=0), "window=0"),
    ("vocab_loss", dict(weights=np.ones(2, FLOAT)), r"weights must be floating \[3\]"),
    ("vocab_loss", dict(target_hidden=np.ones((2, 6), FLOAT)), r"target_hidden must .* \[3, any\]"),
    (
        "vocab_loss",
        dict(draft_token_ids=np.zeros(4, INT)),
        r"draft_token_ids must be integer \[5\]",
    ),
    (
        "vocab_loss",
        dict(draft_head=np.ones((5, 5), FLOAT)),
        r"draft_hidden must be floating \[any, 5\]",
    ),
    ("vocab_loss", dict(row_chunk=0), "row_chunk 0 must be positive"),
    ("vocab_loss", dict(target_soft_cap=-3.0), "target_soft_cap -3.0 must be positive"),
]


def run(operation: str, implementation: str | None, **change):
    function, arguments = OPERATIONS[operation]
    arguments = {**arguments, **change}
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in arguments.items() if name not in arrays}
    # One program, not one per operation of it.
    return jax.jit(lambda arrays: function(**arrays, **rest, implementation=implementation))(arrays)


@pytest.fixture
def without_shape_checks():
    """As users run it: the run-time type checks of these tests are off."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.usefixtures("without_shape_checks")
class TestRefused:
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_what_fits_is_not(self, operation):
        jax.eval_shape(functools.partial(run, operation, "reference"))

    @pytest.mark.parametrize(
        "operation, change, message",
        [
            pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}-{i}")
            for i, case in enumerate(REFUSED)
        ],
    )
    def test_by_every_implementation(self, operation, change, message):
        for implementation in dispatch.IMPLEMENTATIONS:
            with pytest.raises(ValueError, match=message):
                run(operation, implementation, **change)


WIDE = np.ones((1, 2, 1, 1024), FLOAT)
HALF = {
    name: np.ones(array.shape, np.float16)
    for name, array in OPERATIONS["vocab_loss"][1].items()
    if array.ndim == 2
}
NO_TILE = [
    ("short_query_attention", dict(query=WIDE, keys=WIDE, values=WIDE), "heads of 1024 float32"),
    (
        "document_attention",
        dict(q=WIDE, k=WIDE, v=WIDE, document_ids=np.zeros((1, 2), INT)),
        "heads of 1024 float32",
    ),
    ("vocab_loss", HALF, "heads of float16"),
]


@pytest.mark.parametrize("operation, change, reason", NO_TILE, ids=[case[0] for case in NO_TILE])
def test_shapes_without_a_tile_run_by_reference_unless_the_kernel_is_named(
    operation, change, reason
):
    jax.eval_shape(functools.partial(run, operation, None, **change))
    for implementation in ("triton", "interpret"):
        with pytest.raises(NotImplementedError, match=f"{operation}.*{reason}.*leave implemen"):
            run(operation, implementation, **change)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
class TestAllowed:
    def test_ends_past_a_request_are_its_last_row(self, implementation):
        """Nothing behind the request's rows is read."""
        plain = run("expand_batch", implementation)
        past = run("expand_batch", implementation, query_end_loc=np.array([7], INT))
        for left, right in zip(jax.tree.leaves(plain), jax.tree.leaves(past), strict=True):
            np.testing.assert_array_equal(left, right)
        whole = run("expand_tile", implementation)
        past = run("expand_tile", implementation, num_valid=np.array([99], INT))
        for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(past), strict=True):
            np.testing.assert_array_equal(left, right)

    @pytest.mark.parametrize("first", [-5, 7, 100, 2**31 - 8])
    def test_positions_outside_the_cache_have_no_slot(self, implementation, first):
        positions = np.array([first, first + 1], INT)
        expanded = run("expand_batch", implementation, positions=positions)
        inside = [first] if first == 7 else []
        assert [slot for slot in expanded.slots.tolist() if slot < 8] == inside

    def test_31_drafts(self, implementation):
        expanded = run("expand_batch", implementation, num_speculative_tokens=31)
        assert expanded.token_ids.tolist() == [2, 3] + [9] * 30
        assert expanded.sample_rows.tolist() == list(range(1, 32))
        # The cache has room for eight positions.
        assert expanded.slots.tolist() == [*range(8)] + [8] * 24

    def test_anchors_and_depths_that_do_not_exist_see_nothing(self, implementation):
        out = run(
            "rollout_attention",
            implementation,
            anchors=np.array([[-4, 99]], INT),
            depths=np.array([[1, 1]], INT),
        )
        assert not np.asarray(out).any()
        assert not np.asarray(
            run("rollout_attention", implementation, depths=np.array([[0, -1]], INT))
        ).any()

    def test_pages_outside_the_cache_hold_nothing(self, implementation):
        pages = np.ones((3, 2, 2, 8), FLOAT)
        table = np.array([[77, -1, 10**6]], INT)
        options = dict(keys=pages, values=pages, block_table=table)
        assert not np.asarray(run("short_query_attention", implementation, **options)).any()

    def test_positions_past_the_cache_see_all_of_it(self, implementation):
        positions = np.array([[100, 10**6]], INT)
        out = run("short_query_attention", implementation, query_positions=positions)
        np.testing.assert_allclose(out, np.ones((1, 2, 4, 8)), rtol=1e-6)
