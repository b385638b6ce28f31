"""Batches: order, parts per process, resumption, and errors that name the row."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.train.test_hidden_store import INFO, sample
from train.data.hidden_store import HiddenWriter, open_store
from train.data.pack import PADDING, Sample
from train.data.pipeline import PipelineConfig, batches, hold_out


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row i holds 2 + i % 3 copies of token i + 1, all supervised."""

    count: int
    digest: str = "rows"

    def __len__(self):
        return self.count

    @property
    def lengths(self):
        return 2 + np.arange(self.count) % 3

    def __getitem__(self, row):
        length = int(self.lengths[row])
        return Sample(tokens=np.full(length, row + 1, np.int32), loss_mask=np.ones(length, bool))


CONFIG = PipelineConfig(sequence_length=4, global_batch=4, pack=False, read_threads=1)


def rows_of(batch):
    """Rows in each sequence of a batch."""
    return [sorted(set(s[s > 0] - 1)) for s in batch["tokens"]]


def run(source, **changes):
    return [rows_of(b) for b in batches(source, dataclasses.replace(CONFIG, **changes))]


@pytest.mark.parametrize("processes", [2, 4])
def test_G8_processes_read_disjoint_parts_of_one_order(processes):
    """10 rows, batches of 4: two whole batches an epoch, the last two rows left out."""
    alone = run(Rows(10), epochs=2)
    assert len(alone) == 4
    parts = [
        run(Rows(10), epochs=2, process_count=processes, process_index=p) for p in range(processes)
    ]
    joined = [sum((part[i] for part in parts), []) for i in range(4)]
    assert joined == alone, "the order does not depend on the number of processes"
    for epoch in (alone[:2], alone[2:]):
        rows = np.ravel(epoch)
        assert len(set(rows)) == len(rows) == 8
    assert alone[:2] != alone[2:], "a new order each epoch"


def test_G8_workers_touch_neither_devices_nor_distributed_state():
    code = (
        "import numpy as np, jax\n"
        "from tests.train.test_pipeline import CONFIG, Rows, batches\n"
        "assert len(list(batches(Rows(10), CONFIG))) == 2\n"
        "from jax._src import xla_bridge, distributed\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert distributed.global_state.client is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_last_batch_is_filled_with_empty_sequences_when_kept():
    config = dataclasses.replace(CONFIG, drop_remainder=False, shuffle=False)
    *_, last = batches(Rows(10), config)
    assert rows_of(last) == [[8], [9], [], []]
    assert (last["document_ids"][2:] == PADDING).all() and not last["loss_mask"][2:].any()


def test_packed_sequences_hold_every_row_once_an_epoch():
    config = dataclasses.replace(
        CONFIG, sequence_length=16, pack=True, global_batch=2, drop_remainder=False
    )
    seen = []
    for batch in batches(Rows(40), config):
        for tokens, documents, positions in zip(
            batch["tokens"], batch["document_ids"], batch["positions"], strict=True
        ):
            for document in sorted(set(documents) - {PADDING}):
                (row,) = set(tokens[documents == document] - 1)
                seen.append(row)
                length = 2 + row % 3
                assert positions[documents == document].tolist() == list(range(length))
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_saved_position_goes_on_with_the_next_batch(threads, stop):
    config = dataclasses.replace(CONFIG, epochs=3, read_threads=threads)
    whole = [rows_of(b) for b in batches(Rows(10), config)]
    first = batches(Rows(10), config)
    assert first.num_batches == len(whole) == 6
    for _ in range(stop):
        next(first)
    saved = json.loads(json.dumps(first.state()))
    resumed = batches(Rows(10), config)
    resumed.restore(saved)
    assert [rows_of(b) for b in resumed] == whole[stop:]
    # Two processes go on from the same position.
    halves = []
    for process in range(2):
        half = dataclasses.replace(config, process_count=2, process_index=process)
        resumed = batches(Rows(10), half)
        resumed.restore(saved)
        halves.append([rows_of(b) for b in resumed])
    assert [a + b for a, b in zip(*halves, strict=True)] == whole[stop:]


@pytest.mark.parametrize(
    "source, changes",
    [
        (Rows(11), {}),
        (Rows(10, "other contents"), {}),
        (Rows(10), {"seed": 1}),
        (Rows(10), {"global_batch": 2}),
        (Rows(10), {"sequence_length": 5}),
    ],
)
def test_a_position_of_other_data_is_refused(source, changes):
    saved = batches(Rows(10), CONFIG).state()
    if len(source) == 11:
        source = dataclasses.replace(source, digest="eleven")
    with pytest.raises(ValueError, match="saved data position belongs to other data"):
        batches(source, dataclasses.replace(CONFIG, **changes)).restore(saved)


def test_held_out_rows_are_never_trained_on():
    train, held = hold_out(Rows(10), 2, seed=1)
    assert len(train) == 8 and len(held) == 2 and train.digest != held.digest
    trained = np.ravel(run(train, epochs=3))
    assert set(trained) | set(held.rows) == set(range(10)) and not set(trained) & set(held.rows)
    assert hold_out(Rows(10), 2, seed=1)[0].digest == train.digest
    assert hold_out(Rows(10), 2, seed=2)[0].digest != train.digest
    for count in (1, -1):
        with pytest.raises(ValueError, match=f"cannot hold out {count} of 1"):
            hold_out(Rows(1), count)


def test_endless_epochs_are_shuffled_anew():
    stream = batches(Rows(8), dataclasses.replace(CONFIG, epochs=None))
    assert stream.num_batches is None
    orders = {json.dumps([rows_of(next(stream)) for _ in range(2)], default=int) for _ in range(5)}
    assert len(orders) == 5


def test_states_travel_with_their_rows(tmp_path):
    with HiddenWriter(tmp_path, INFO) as writer:
        for i in range(3):
            writer.add(f"{i}", **sample(i, rows=3))
    config = PipelineConfig(
        sequence_length=7, global_batch=2, pack=True, shuffle=False, drop_remainder=False
    )
    store = open_store(tmp_path)
    stream = batches(store, config)
    batch = next(stream)
    assert batch["taps"].shape == (2, 7, 12) and batch["last_hidden"].shape == (2, 7, 4)
    for sequence, rows in enumerate(stream.packing.bins):
        taps = np.concatenate([store[row].taps for row in rows])
        np.testing.assert_array_equal(batch["taps"][sequence, : len(taps)], taps)
        assert not batch["taps"][sequence, len(taps) :].any()


def test_E18_a_damaged_sample_stops_the_pipeline_and_the_position_stays(tmp_path):
    with HiddenWriter(tmp_path, INFO) as writer:
        for i in range(4):
            writer.add(f"{i}", **sample(i, rows=3))
    (shard,) = tmp_path.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    config = dataclasses.replace(CONFIG, global_batch=1, shuffle=False, read_threads=0)
    stream = batches(open_store(tmp_path), config)
    for _ in range(3):
        next(stream)
    saved = stream.state()
    with pytest.raises(ValueError, match="sample '3'"):
        next(stream)
    assert stream.state() == saved


@pytest.mark.parametrize(
    "source, changes, message",
    [
        (Rows(3), {}, "3 packed sequences do not fill a batch of 4"),
        (Rows(9), {"sequence_length": 2, "global_batch": 8}, "3 packed sequences"),
        (Rows(9), {"process_count": 3}, "multiple of the 3 processes"),
        (Rows(9), {"process_count": 2, "process_index": 2}, "process 2 of 2"),
        (Rows(9), {"epochs": 0}, "epochs is 0"),
        (Rows(9), {"global_batch": 0}, "global_batch is 0"),
    ],
)
def test_impossible_pipelines_are_named(source, changes, message):
    with pytest.raises(ValueError, match=message):
        batches(source, dataclasses.replace(CONFIG, **changes))
