"""Rows, stores and targets that do not belong together are refused before anything is trained."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.train import tiny_run
from train.assemble import assemble
from train.capture import capture
from train.data.hidden_store import HiddenWriter, open_store
from train.data.prepared import PreparedWriter, open_prepared

TAPS = (2, 3, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Rows, other rows, the same ids under another vocabulary, and a store of the first rows."""
    base = tmp_path_factory.mktemp("parts")
    rows = open_prepared(tiny_run.write_data(base / "rows", rows=16))
    tiny_run.write_data(base / "others", rows=16, seed=1)
    write(base / "wider", [rows[row].tokens for row in range(16)], vocab_size=24)
    write(base / "masked", [np.int32([3, tiny_run.MASK_TOKEN, 5])] * 16)
    store(base, "rows", "states")
    return base


def write(folder, rows, vocab_size=tiny_run.VOCAB):
    with PreparedWriter(folder, vocab_size) as writer:
        for tokens in rows:
            writer.add(tokens, np.arange(len(tokens)) > 0)
        writer.finish(digest="x", settings={}, report={}, draft_vocab_size=tiny_run.WORDS)


def store(base, rows, states, target=None, **options):
    options = {"name": "rule", "dtype": "float32"} | options
    target = target or tiny_run.rule_target()
    return capture(open_prepared(base / rows), target, TAPS, base / states, **options)


def tuned():
    """The target with other weights in one projection, under the same name and sizes."""
    graph, state = nnx.split(tiny_run.rule_target())
    change = lambda path, x: x * 2 if "qkv" in jax.tree_util.keystr(path) else x  # noqa: E731
    return nnx.merge(graph, jax.tree.map_with_path(change, state))


def made(base, rows, **sections):
    recipe = tiny_run.recipe(base / rows, base / "run", **sections)
    return assemble(recipe, tiny_run.rule_target())


def test_a_store_is_gone_on_with_by_its_own_rows_and_target_only(base):
    there = open_store(base / "states")
    assert store(base, "rows", "states").digest == there.digest
    with pytest.raises(ValueError, match=r"states: holds other states \(rows is '\w+', not '\w+'"):
        store(base, "others", "states")
    with pytest.raises(ValueError, match=r"fingerprint is '\w+', not '\w+'\)"):
        store(base, "rows", "states", tuned())
    assert open_store(base / "states").digest == there.digest


def test_what_cannot_be_captured_is_refused_before_the_target_runs(base, tmp_path):
    with pytest.raises(ValueError, match="wider: token ids of a vocabulary of 24.* has 20"):
        store(base, "wider", tmp_path / "states")
    for taps in ((3, 2, 4), (2, 2, 3), (2, 3, 6), (-1, 2, 3)):
        with pytest.raises(ValueError, match=r"capture: --taps.* out of 0\.\.5"):
            capture(open_prepared(base / "rows"), tiny_run.rule_target(), taps, tmp_path, name="x")
    assert not any(tmp_path.iterdir())


def test_a_process_without_rows_captures_nothing(base, tmp_path):
    write(base / "one", [np.int32([1, 2, 3])])
    share = {"process_index": 1, "process_count": 2}
    assert store(base, "one", tmp_path / "states", **share) is None
    assert len(store(base, "one", tmp_path / "states", process_count=2)) == 1
    assert len(store(base, "one", tmp_path / "states", **share)) == 1


def test_states_of_another_target_are_not_trained_on(base):
    assert made(base, "states").too_long == {"training": (0, 16)}
    store(base, "rows", "tuned", tuned())
    with pytest.raises(ValueError, match=r"tuned: states of the target rule \(\w+\), the recipe's"):
        made(base, "tuned")
    with pytest.raises(ValueError, match="tuned: states of the target rule"):
        made(base, "states", data={"validation": str(base / "tuned")})


def test_a_store_that_does_not_say_whose_it_is_is_read(base):
    known = open_store(base / "states")
    info = dataclasses.replace(known.info, fingerprint=None, vocab_size=None, rows=None)
    with HiddenWriter(base / "unknown", info) as writer:
        for name in known.names:
            writer.add(name, **dataclasses.asdict(known.read(name)))
    made(base, "unknown")


def test_the_mask_token_occurs_neither_in_rows_nor_in_states(base):
    store(base, "masked", "masked-states")
    for name in ("masked", "masked-states"):
        with pytest.raises(ValueError, match=f"mask token 19 occurs 16 times in .*{name}"):
            made(base, name)
    with pytest.raises(ValueError, match=r"token ids from 3 to 19, the target's vocabulary has 19"):
        open_store(base / "masked-states").check_tokens(19, None)


WIDER = {
    "data.path": ("wider", {}),
    "data.validation": ("rows", {"data": {"validation": "{base}/wider"}}),
    "drafter.vocabulary": (
        "rows",
        {"drafter": {"vocabulary": "{base}/wider", "draft_vocab_size": tiny_run.WORDS}},
    ),
}


@pytest.mark.parametrize("key", WIDER)
def test_rows_of_another_vocabulary_are_refused(base, key):
    rows, sections = WIDER[key]
    sections = {
        name: {k: v.format(base=base) if isinstance(v, str) else v for k, v in keys.items()}
        for name, keys in sections.items()
    }
    with pytest.raises(ValueError, match="wider: token ids of a vocabulary of 24"):
        made(base, rows, **sections)


def test_validation_rows_must_go_the_way_of_the_training_rows(base):
    store(base, "rows", "half", dtype="bfloat16")
    cases = [
        ("rows", "states", "data.validation is a store .*, data.path prepared rows"),
        ("states", "rows", "data.validation is prepared rows, data.path a store"),
        ("states", "half", "holds bfloat16, normed states, data.path float32"),
    ]
    for rows, validation, message in cases:
        with pytest.raises(ValueError, match=message):
            made(base, rows, data={"validation": str(base / validation)})


def test_rows_longer_than_a_sequence_are_counted(base):
    write(base / "long", [np.arange(n, dtype=np.int32) % 16 for n in (*[20] * 10, 50, 60)])
    write(base / "too long", [np.arange(50, dtype=np.int32) % 16])
    data = {"validation": str(base / "long"), "pack": False}
    found = made(base, "long", data=data)
    assert found.too_long == {"training": (2, 12), "validation": (2, 12)}
    with pytest.raises(ValueError, match="validation: none of the 1 rows fits a sequence of 42"):
        made(base, "rows", data={"validation": str(base / "too long")})


def test_damaged_rows_are_not_trained_on(base):
    tiny_run.write_data(base / "damaged", rows=16)
    path = base / "damaged" / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    for rows, part in (
        ("damaged", {}),
        ("rows", {"data": {"validation": str(base / "damaged")}}),
        ("rows", {"drafter": {"vocabulary": str(base / "damaged"), "draft_vocab_size": 16}}),
    ):
        with pytest.raises(ValueError, match="tokens.bin: checksum differs; prepare"):
            made(base, rows, **part)
