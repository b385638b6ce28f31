"""`expand_batch`: published worked examples, a brute-force oracle, poison, counted work, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import CacheLayout, KernelSharding, expand_batch, expand_tile
from pallas_kernels.expand_batch import drafting_method, shapes
from tests.kernels import expand_oracle
from tests.kernels.counting import count_accesses, total

MASK, PADDING = 97, -7


def ints(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def flags(rows, size: int) -> list[bool]:
    return [row in rows for row in range(size)]


# Worked examples of the public layout (vLLM's test suite and an emulation of its rules).
EXAMPLES = {
    "A1: two rejected of four, none of two": dict(
        method=("p_eagle", 4),
        lengths=[4, 2],
        ids=[11, 12, 13, 14, 21, 22],
        positions=[5, 6, 7, 8, 0, 1],
        next=[99, 88],
        rejected=[2, 0],
        out_ids=[12, 99, MASK, MASK, MASK, PADDING, PADDING, 22, 88, MASK, MASK, MASK],
        out_positions=[5, 6, 7, 8, 9, 0, 0, 0, 1, 2, 3, 4],
        rejected_rows={5, 6},
        mask_rows={2, 3, 4, 9, 10, 11},
        sample=[1, 2, 3, 4, 8, 9, 10, 11],
        hidden=[0, 1, 2, 3, 7, 8],
        starts=[0, 7, 12],
        padding=PADDING,
    ),
    "some rejected": dict(
        method=("p_eagle", 3),
        lengths=[4, 4],
        ids=[10, 11, 12, 13, 20, 21, 22, 23],
        positions=[5, 6, 7, 8, 10, 11, 12, 13],
        next=[100, 200],
        rejected=[1, 0],
        out_ids=[11, 12, 100, MASK, MASK, 0, 21, 22, 23, 200, MASK, MASK],
        out_positions=[5, 6, 7, 8, 9, 0, 10, 11, 12, 13, 14, 15],
        rejected_rows={5},
        mask_rows={3, 4, 10, 11},
        sample=[2, 3, 4, 9, 10, 11],
        hidden=[0, 1, 2, 3, 6, 7, 8, 9],
        starts=[0, 6, 12],
    ),
    "heavy rejection": dict(
        method=("p_eagle", 3),
        lengths=[4, 4],
        ids=[50, 51, 52, 53, 60, 61, 62, 63],
        positions=[20, 21, 22, 23, 7, 8, 9, 10],
        next=[90, 91],
        rejected=[3, 2],
        out_ids=[90, MASK, MASK, 0, 0, 0, 61, 91, MASK, MASK, 0, 0],
        out_positions=[20, 21, 22, 0, 0, 0, 7, 8, 9, 10, 0, 0],
        rejected_rows={3, 4, 5, 10, 11},
        mask_rows={1, 2, 8, 9},
        sample=[0, 1, 2, 7, 8, 9],
        hidden=[0, 1, 2, 3, 6, 7, 8, 9],
        starts=[0, 6, 12],
    ),
    "prefill, last chunk and decode": dict(
        method=("p_eagle", 4),
        lengths=[5, 2, 5],
        ids=[1, 2, 3, 4, 5, 30, 31, 70, 71, 72, 73, 74],
        positions=[0, 1, 2, 3, 4, 16, 17, 40, 41, 42, 43, 44],
        next=[6, 32, 99],
        rejected=[0, 0, 2],
        out_ids=[2, 3, 4, 5, 6, MASK, MASK, MASK, 31, 32, MASK, MASK, MASK]
        + [71, 72, 99, MASK, MASK, MASK, 0, 0],
        out_positions=[*range(8), *range(16, 21), *range(40, 46), 0, 0],
        rejected_rows={19, 20},
        mask_rows={5, 6, 7, 10, 11, 12, 16, 17, 18},
        sample=[4, 5, 6, 7, 9, 10, 11, 12, 15, 16, 17, 18],
        hidden=[0, 1, 2, 3, 4, 8, 9, 13, 14, 15, 16, 17],
        starts=[0, 8, 13, 21],
    ),
    "partial chunk and a decode without drafts": dict(
        method=("p_eagle", 3),
        lengths=[4, 1],
        ids=[1, 2, 3, 4, 9],
        positions=[0, 1, 2, 3, 11],
        next=[5, 10],
        rejected=[0, 0],
        out_ids=[2, 3, 4, 5, MASK, MASK, 10, MASK, MASK],
        out_positions=[0, 1, 2, 3, 4, 5, 11, 12, 13],
        rejected_rows=set(),
        mask_rows={4, 5, 7, 8},
        sample=[3, 4, 5, 6, 7, 8],
        hidden=[0, 1, 2, 3, 6],
        starts=[0, 6, 9],
    ),
    "pard": dict(
        method=("pard", 3),
        lengths=[4, 4],
        ids=[50, 51, 52, 53, 60, 61, 62, 63],
        positions=[20, 21, 22, 23, 7, 8, 9, 10],
        next=[90, 91],
        rejected=[1, 0],
        out_ids=[50, 51, 52, 90, MASK, MASK, 0, 60, 61, 62, 63, 91, MASK, MASK],
        out_positions=[20, 21, 22, 23, 24, 25, 0, *range(7, 14)],
        rejected_rows={6},
        mask_rows={4, 5, 12, 13},
        sample=[3, 4, 5, 11, 12, 13],
        hidden=None,
        starts=[0, 7, 14],
    ),
    "draft model": dict(
        method=("draft_model", 3),
        lengths=[3, 2],
        ids=[10, 11, 12, 20, 21],
        positions=[0, 1, 2, 7, 8],
        next=[100, 200],
        rejected=[0, 0],
        out_ids=[10, 11, 12, 100, 20, 21, 200],
        out_positions=[0, 1, 2, 3, 7, 8, 9],
        rejected_rows=set(),
        mask_rows=set(),
        sample=[3, 6],
        hidden=None,
        starts=[0, 4, 7],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_oracle_gives_the_worked_examples_A1(name):
    example = EXAMPLES[name]
    method = drafting_method(*example["method"])
    starts = np.concatenate([[0], np.cumsum(example["lengths"])])
    found = expand_oracle.expand(
        example["ids"],
        example["positions"],
        example["next"],
        starts,
        starts[1:] - 1 - np.array(example["rejected"]),
        shift=method.shift,
        sampled=method.sampled_rows,
        mask_id=MASK,
        padding_id=example.get("padding", 0),
        num_rows=len(example["out_ids"]),
    )
    check_example(found, example)


# All others reach the implementations by way of the oracle.
@pytest.mark.parametrize("name", ["A1: two rejected of four, none of two", "pard"])
def test_worked_examples_A1(name, implementation):
    example = EXAMPLES[name]
    starts = np.concatenate([[0], np.cumsum(example["lengths"])])
    method, drafts = example["method"]
    expand = functools.partial(
        expand_batch,
        method=method,
        num_speculative_tokens=drafts,
        mask_token_id=MASK,
        padding_token_id=example.get("padding", 0),
        implementation=implementation,
    )
    ends = starts[1:] - 1 - np.array(example["rejected"])
    arrays = (example["ids"], example["positions"], example["next"], starts, ends)
    expanded = jax.jit(expand)(*map(ints, arrays))
    check_example(jax.tree.map(np.asarray, vars(expanded)), example)
    assert expanded.slots is None


def check_example(found: dict, example: dict):
    size = len(example["out_ids"])
    assert list(found["token_ids"]) == example["out_ids"]
    assert list(found["positions"]) == example["out_positions"]
    assert list(found["is_rejected"]) == flags(example["rejected_rows"], size)
    assert list(found["is_mask"]) == flags(example["mask_rows"], size)
    assert list(found["sample_rows"]) == example["sample"]
    assert list(found["query_start_loc"]) == example["starts"]
    if example["hidden"] is None:
        assert found["hidden_rows"] is None and found["source_rows"] is None
    else:
        assert list(found["hidden_rows"]) == example["hidden"]


# One compiled program per method and cache; hypothesis draws what flows through it.
REQUESTS, TARGET_ROWS, PAGES, PAGE_SIZE = 3, 13, 5, 4
CASES = {
    "p_eagle paged": ("p_eagle", 4, True, TARGET_ROWS),
    "p_eagle contiguous": ("p_eagle", 4, False, TARGET_ROWS),
    "p_eagle one draft": ("p_eagle", 1, True, TARGET_ROWS),
    "eagle3": ("eagle3", 4, True, TARGET_ROWS),
    "pard": ("pard", 3, True, TARGET_ROWS),
}


@functools.cache
def program(case: tuple, implementation: str):
    method, drafts, paged, target_rows = case
    cache = CacheLayout(
        page_size=PAGE_SIZE if paged else PAGES * PAGE_SIZE,
        num_slots=REQUESTS * PAGES * PAGE_SIZE,
        max_length=PAGES * PAGE_SIZE - 1,
    )
    # Rows of the bucket beyond the live ones: not a multiple of any block.
    num_rows = target_rows + REQUESTS * drafting_method(method, drafts).new_rows + 5

    def expand(ids, positions, following, starts, ends, table):
        return expand_batch(
            ids,
            positions,
            following,
            starts,
            ends,
            method=method,
            num_speculative_tokens=drafts,
            mask_token_id=MASK,
            num_rows=num_rows,
            padding_token_id=PADDING,
            cache=cache,
            block_table=table if paged else None,
            implementation=implementation,
        )

    return jax.jit(expand), cache, num_rows


@st.composite
def batches(draw, target_rows: int = TARGET_ROWS):
    """Ragged requests: empty, one row, long, all rejected, rows of no request at the end."""
    lengths = []
    for _ in range(REQUESTS):
        room = target_rows - sum(lengths)
        lengths.append(draw(st.one_of(st.integers(0, min(room, 5)), st.integers(0, room))))
    valid = [draw(st.integers(min(length, 1), length)) if length else 0 for length in lengths]
    if draw(st.booleans()):
        valid[draw(st.integers(0, REQUESTS - 1))] = 0
    first = [draw(st.integers(0, PAGES * PAGE_SIZE - 1)) for _ in range(REQUESTS)]
    seed = draw(st.integers(0, 2**16))
    return lengths, valid, first, seed


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_equals_the_oracle_I5(case, batch):
    check_batch(CASES[case], batch)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_drawn_shapes_equal_the_oracle(data):
    method = data.draw(st.sampled_from(["p_eagle", "eagle3", "draft_model", "pard"]))
    # Long requests take several blocks.
    target_rows = data.draw(st.one_of(st.integers(1, 40), st.integers(300, 700)))
    case = (method, data.draw(st.integers(1, 31)), data.draw(st.booleans()), target_rows)
    check_batch(case, data.draw(batches(target_rows)))


def check_batch(case: tuple, batch: tuple):
    method, drafts, paged, target_rows = case
    lengths, valid, first, seed = batch
    generator = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ends = starts[:-1] + np.array(valid) - 1
    ids = generator.integers(0, 50, target_rows)
    # Rows of no request hold poison: nothing of them may come through.
    positions = np.full(target_rows, -12345)
    ids[starts[-1] :] = -12345
    for request, start in enumerate(first):
        rows = slice(starts[request], starts[request + 1])
        positions[rows] = start + np.arange(lengths[request])
    following = generator.integers(50, 90, REQUESTS)
    table = generator.permutation(REQUESTS * PAGES).reshape(REQUESTS, PAGES)
    table[generator.random(table.shape) < 0.2] = -1
    table[generator.random(table.shape) < 0.1] = 1000
    layout = drafting_method(method, drafts)
    _, cache, num_rows = program(case, "reference")

    def page_of(request, part):
        page = table[request, part] if paged else request
        return int(page) if 0 <= page < REQUESTS * PAGES else None

    expected = expand_oracle.expand(
        ids,
        positions,
        following,
        starts,
        ends,
        shift=layout.shift,
        sampled=layout.sampled_rows,
        mask_id=MASK,
        padding_id=PADDING,
        num_rows=num_rows,
        page_of=page_of,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
        max_length=cache.max_length,
    )
    arguments = [ints(array) for array in (ids, positions, following, starts, ends, table)]
    for implementation in ("reference", "interpret"):
        expanded = program(case, implementation)[0](*arguments)
        for name, array in expected.items():
            found = getattr(expanded, name)
            if array is None:
                assert found is None
            else:
                np.testing.assert_array_equal(found, array, f"{implementation}: {name}")


def test_tile_equals_the_ragged_batch(implementation):
    requests, drafts = 5, 3
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 50, (requests, drafts + 1))
    start = generator.integers(0, 30, requests)
    valid = np.array([1, 4, 0, 2, 3])
    following = generator.integers(50, 90, requests)
    expand = functools.partial(expand_tile, mask_token_id=MASK, implementation=implementation)
    tile = jax.jit(expand)(*map(ints, (ids, start, following, valid)))
    starts = np.arange(requests + 1) * (drafts + 1)
    expected = expand_oracle.expand(
        ids.reshape(-1),
        (start[:, None] + np.arange(drafts + 1)).reshape(-1),
        following,
        starts,
        starts[:-1] + valid - 1,
        shift=True,
        sampled=drafts,
        mask_id=MASK,
        padding_id=0,
        num_rows=requests * 2 * drafts,
    )
    rejected = expected["is_rejected"].reshape(requests, -1)
    np.testing.assert_array_equal(tile.token_ids, expected["token_ids"].reshape(requests, -1))
    positions = np.where(rejected, -1, expected["positions"].reshape(requests, -1))
    np.testing.assert_array_equal(tile.positions, positions)
    np.testing.assert_array_equal(tile.is_mask, expected["is_mask"].reshape(requests, -1))
    source = expected["source_rows"].reshape(requests, -1)
    np.testing.assert_array_equal(
        tile.source_rows, np.where(source >= 0, source - starts[:-1, None], -1)
    )
    sample = np.array(expected["sample_rows"]).reshape(requests, drafts)
    new_starts = np.array(expected["query_start_loc"])[:-1, None]
    np.testing.assert_array_equal(tile.sample_rows, sample - new_starts)


def test_tile_keeps_the_batch_sharded_I11():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = NamedSharding(mesh, P("data"))
    generator = np.random.default_rng(1)
    arrays = [
        ints(generator.integers(0, 50, (8, 4))),
        ints(generator.integers(0, 30, 8)),
        ints(generator.integers(50, 90, 8)),
        ints(generator.integers(0, 5, 8)),
    ]
    expand = functools.partial(expand_tile, mask_token_id=MASK)
    expected = jax.jit(functools.partial(expand, implementation="reference"))(*arrays)
    sharded = jax.jit(
        functools.partial(
            expand,
            sharding=KernelSharding(mesh=mesh, batch="data"),
            implementation="interpret",
        )
    )(*(jax.device_put(array, batch) for array in arrays))
    assert sharded.token_ids.sharding.is_equivalent_to(batch, 2)
    for found, array in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, array)


def test_writes_every_element_once_and_little_else():
    """Decode size: 64 requests, K = 7; elements against a count made from the inputs alone."""
    shape = next(shape for shape in shapes.SHAPES if shape.name == "decode-64-k7")
    positional, arrays = shapes.random_arguments(shape, 0)

    def expand(positional, arrays):
        return expand_batch(*positional, **arrays, **shape.keywords(), implementation="interpret")

    expanded, counts = count_accesses(expand, positional, arrays)
    written = {label: count for (kind, label), count in counts.items() if kind == "store"}
    sizes = {name: getattr(expanded, name).size for name in written}
    assert written == sizes and len(sizes) == 9, "each output element is stored exactly once"

    starts, ends = np.asarray(positional[3]), np.asarray(positional[4])
    copied = int(np.sum(ends - starts[:-1]))
    live = ~np.asarray(expanded.is_rejected)
    # Per request: two offsets, its end, its new token, its first position; a page per live row.
    least_loads = copied + len(starts) + 3 * shape.requests + int(np.sum(live))
    least = least_loads + sum(sizes.values())
    assert total(counts) <= 1.25 * least


def test_reports_what_does_not_fit():
    arrays = (ints([1, 2]), ints([0, 1]), ints([3]), ints([0, 2]), ints([1]))
    with pytest.raises(ValueError, match="4 rows, the bucket num_rows has 3"):
        expand_batch(*arrays, num_speculative_tokens=3, mask_token_id=MASK, num_rows=3)
    with pytest.raises(ValueError, match="unknown drafting method 'medusa'"):
        expand_batch(*arrays, method="medusa", mask_token_id=MASK)
    with pytest.raises(ValueError, match="needs a cache layout"):
        expand_batch(*arrays, mask_token_id=MASK, block_table=ints([[0]]))
