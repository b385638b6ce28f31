"""`python -m tests.golden training FOLDER...`: a public library's P-EAGLE loss and gradients.

A folder whose inputs have no draw holds an EAGLE-3 head (`tests.golden.eagle3`).

Each folder holds a drafter, one batch with its draw, and what `speculators` computed from them; see
its README. Everything goes through the public functions of `train`, in each partition mode.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.drafter_tensors import drafter_parts
from peagle_jax.checkpoints.safetensors_file import open_safetensors
from tests.golden import eagle3, report
from train.losses import Objective
from train.objective import element_hidden, loss_sum, make_objective, value_and_grad
from train.parameters import Trained, kept_ids, parameters_of, split
from train.partition import RolloutChunks, element_slots
from train.rows import Chunks, TargetHead, TrainingRows, training_rows
from train.sampling import CodConfig, lengths_from_elements

LOGITS, LOSS, GRADIENT = 1e-4, 1e-5, 1e-4
MODES = {
    "structured, 1 chunk": {"num_chunks": 1},
    "structured, 2 chunks": {"num_chunks": 2},
    "structured, 4 chunks": {"num_chunks": 4},
    "structured, 7 chunks": {"num_chunks": 7},
    "Algorithm 1, S = 1": {"partition": "algorithm-1", "num_chunks": 1},
    "Algorithm 1, S = 2": {"partition": "algorithm-1", "num_chunks": 2},
    "Algorithm 1, S = 4": {"partition": "algorithm-1", "num_chunks": 4},
}
"""Partition modes, as arguments of `make_objective`."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden folder, read."""

    drafter: object
    rows: TrainingRows
    head: TargetHead
    lengths: jax.Array
    anchors: np.ndarray
    depths: np.ndarray
    expected: dict[str, np.ndarray]


def read_case(folder: Path) -> Case:
    """The folder's drafter, batch, draw and expected values."""
    inputs = _tensors(folder / "inputs.safetensors")
    drafter = load_drafter(folder / "draft", dtype=jnp.float32)
    config = drafter.config
    kept = kept_ids(config, parameters_of(drafter))
    matrix = jnp.asarray(inputs["verifier_lm_head.weight"])
    head = TargetHead(
        matrix=matrix,
        of_draft=None if kept is None else matrix[kept],
        norm=jnp.asarray(inputs["verifier_norm.weight"]),
        transposed=True,
        norm_eps=config.norm_eps,
    )
    anchors, depths = inputs["anchor_pos"], inputs["depth"]
    ids = np.asarray(inputs["document_ids"], np.int32)
    rows = TrainingRows(
        tokens=jnp.asarray(inputs["input_ids"], jnp.int32),
        taps=jnp.asarray(inputs["hidden_states"]),
        last_hidden=jnp.asarray(inputs["verifier_last_hidden_states"]),
        loss_mask=jnp.asarray(inputs["loss_mask"]),
        document_ids=jnp.asarray(ids),
        positions=jnp.arange(ids.shape[1], dtype=jnp.int32)[None],
    )
    lengths = lengths_from_elements(anchors, depths, ids.shape[1])
    expected = _tensors(folder / "expected.safetensors")
    _check_alignment(rows, inputs)
    return Case(drafter, rows, head, jnp.asarray(lengths)[None], anchors, depths, expected)


def check(
    folder: Path, heads: tuple[bool, ...] = (False, True)
) -> Iterator[tuple[str, float, float]]:
    """Every comparison of a folder: what, the difference found, the largest allowed.

    heads: whether the head is trained; its gradient is compared where it is.

    Counts are exact: their difference is the number of wrong ones, and none is allowed.
    """
    case = read_case(folder)
    yield from _check_logits(case)
    for mode, options in MODES.items():
        for train_head in heads:
            name = f"{mode}, {'trained' if train_head else 'frozen'} head"
            yield from _check_mode(case, name, options, train_head)


def _check_alignment(rows: TrainingRows, inputs: dict[str, np.ndarray]) -> None:
    """The unshifted documents give the same rows through the product's own shift."""
    raws = []
    while f"raw.{len(raws)}.input_ids" in inputs:
        prefix = f"raw.{len(raws)}."
        raws.append(
            {name.removeprefix(prefix): x for name, x in inputs.items() if name.startswith(prefix)}
        )
    if not raws:
        raise ValueError("inputs.safetensors has no raw.* documents")
    joined = {name: np.concatenate([raw[name] for raw in raws]) for name in raws[0]}
    ids = np.concatenate([np.full(len(r["input_ids"]), i) for i, r in enumerate(raws)])
    got = training_rows(
        jnp.asarray(joined["input_ids"], jnp.int32)[None],
        jnp.asarray(joined["hidden_states"])[None],
        jnp.asarray(joined["verifier_last_hidden_states"])[None],
        jnp.asarray(joined["loss_mask"].astype(bool))[None],
        jnp.asarray(ids, jnp.int32)[None],
    )
    real = np.flatnonzero(np.asarray(got.document_ids[0]) >= 0)
    theirs = np.flatnonzero(np.asarray(rows.document_ids[0]) >= 0)
    for name in ("tokens", "taps", "last_hidden", "loss_mask", "document_ids"):
        ours, wanted = np.asarray(getattr(got, name))[0][real], np.asarray(getattr(rows, name))
        np.testing.assert_array_equal(ours, wanted[0][theirs], err_msg=name)


def _objective(case: Case, options: dict, train_head: bool) -> Objective:
    cod = CodConfig(num_depths=int(case.depths.max()) + 1, ratio=1)
    rows = case.rows.tokens.shape[1]
    return make_objective(case.drafter.config, cod, rows, train_head=train_head, **options)


def _check_logits(case: Case) -> Iterator[tuple[str, float, float]]:
    objective = _objective(case, {"num_chunks": 2}, False)
    learned, frozen = split(
        case.drafter.config, parameters_of(case.drafter), Trained(), jnp.float32
    )
    stream, mask, chunks = jax.jit(functools.partial(element_hidden, objective))(
        learned, frozen, case.rows, case.lengths
    )
    slots = element_slots(_first(chunks), case.anchors, case.depths)
    flat = np.asarray(mask)[0].reshape(-1, mask.shape[-1])
    hidden = np.where((case.depths == 0)[:, None], np.asarray(stream)[0][case.anchors], flat[slots])
    logits = np.asarray(case.drafter.logits(jnp.asarray(hidden)))
    compared = case.expected["compare_mask"].astype(bool)
    difference = np.abs(logits - case.expected["draft_logits"])[compared].max()
    yield "draft logits", float(difference), LOGITS


def _first(chunks: Chunks) -> RolloutChunks:
    """Chunks of the only sequence."""
    return RolloutChunks(**{name: value[0] for name, value in chunks._asdict().items()})


def _check_mode(
    case: Case, name: str, options: dict, train_head: bool
) -> Iterator[tuple[str, float, float]]:
    config = case.drafter.config
    trained = Trained(head=train_head)
    learned, frozen = split(config, parameters_of(case.drafter), trained, jnp.float32)
    objective = _objective(case, options, train_head)
    sums, grads = jax.jit(functools.partial(value_and_grad, objective))(
        learned, frozen, case.head, case.rows, case.lengths
    )
    expected = case.expected
    count = int(sums.count)
    yield f"{name}: loss", abs(float(sums.loss) / count - float(expected["loss"][0])), LOSS
    wrong = int(count != int(expected["supervised_count"][0]))
    wrong += int((np.asarray(sums.correct) != expected["position_acc_sum"]).sum())
    wrong += int((np.asarray(sums.total) != expected["position_acc_total"]).sum())
    yield f"{name}: counts", float(wrong), 0.0
    for part in drafter_parts(config):
        if part.parameter not in grads:
            continue
        ours = part.split(np.asarray(grads[part.parameter]) / count)
        for (tensor, _), value in zip(part.tensors, ours, strict=True):
            prefix = "grad_if_trainable." if part.parameter == "head" else "grad."
            wanted = expected[prefix + tensor].reshape(value.shape)
            error = np.linalg.norm(value - wanted) / np.linalg.norm(wanted)
            yield f"{name}: gradient of {tensor}", float(error), GRADIENT


def check_plain_gradient(case: Case) -> float:
    """Largest relative difference of `jax.grad(loss_sum)` and `value_and_grad`, head trained."""
    config = case.drafter.config
    learned, frozen = split(config, parameters_of(case.drafter), Trained(head=True), jnp.float32)
    objective = _objective(case, {"num_chunks": 2}, True)
    arguments = (learned, frozen, case.head, case.rows, case.lengths)
    _, ours = jax.jit(functools.partial(value_and_grad, objective))(*arguments)
    plain, _ = jax.jit(jax.grad(functools.partial(loss_sum, objective), has_aux=True))(*arguments)
    return max(
        float(jnp.linalg.norm(ours[n] - plain[n]) / jnp.linalg.norm(plain[n])) for n in plain
    )


def check_folders(folders: Iterable[str]) -> Iterator[report.Case]:
    """One case per folder and partition mode, with the largest difference of each kind."""
    for folder in map(Path, folders):
        try:
            found = list(_check_of(folder))
        except (OSError, ValueError) as error:
            yield report.Case(name=str(folder), errors={}, problem=str(error))
            continue
        modes: dict[str, dict[str, tuple[float, float]]] = {}
        for what, difference, allowed in found:
            mode, _, kind = what.rpartition(": ")
            errors = modes.setdefault(mode, {})
            kind = kind.split(" of ")[0]
            # A NaN is not below anything: it stays.
            worst = errors.get(kind, (0.0, allowed))[0]
            errors[kind] = (worst if difference <= worst else difference, allowed)
        for mode, errors in modes.items():
            yield report.Case(name=f"{folder} {mode}".strip(), errors=errors)


def _check_of(folder: Path) -> Iterator[tuple[str, float, float]]:
    parallel = "anchor_pos" in open_safetensors(folder / "inputs.safetensors").tensors
    return check(folder) if parallel else eagle3.check(folder)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    file = open_safetensors(path)
    return {name: np.asarray(file.read(name)) for name in file.tensors}
