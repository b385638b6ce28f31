"""A public library's EAGLE-3 loss and gradients by training-time test, through `train.eagle3`."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoints.drafter_files import load_drafter
from peagle_jax.checkpoints.drafter_tensors import drafter_parts
from peagle_jax.checkpoints.safetensors_file import open_safetensors
from train.eagle3 import Unroll, step_weights, supervised_rows, unroll_loss
from train.parameters import Trained, parameters_of, split
from train.rows import TargetHead, TrainingRows

LOSS, GRADIENT = 1e-5, 1e-4
DECAY = 0.9


def check(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Every comparison of a folder: what, the difference found, the largest allowed.

    Raises:
        ValueError: the library has a gradient that was not compared.
    """
    inputs, expected = (_tensors(folder / f"{name}.safetensors") for name in ("inputs", "expected"))
    drafter = load_drafter(folder / "draft", dtype=jnp.float32)
    config = drafter.config
    trained = Trained(embedding="frozen", head=True)
    learned, frozen = split(config, parameters_of(drafter), trained, jnp.float32)
    head = TargetHead(
        matrix=jnp.asarray(inputs["verifier_lm_head.weight"]),
        norm=jnp.asarray(inputs["verifier_norm.weight"]),
        transposed=True,
        norm_eps=config.norm_eps,
    )
    ids = np.asarray(inputs["document_ids"], np.int32)
    rows = TrainingRows(
        tokens=jnp.asarray(inputs["input_ids"], jnp.int32),
        taps=jnp.asarray(inputs["hidden_states"]),
        last_hidden=jnp.asarray(inputs["verifier_last_hidden_states"]),
        loss_mask=jnp.asarray(inputs["loss_mask"].astype(bool)),
        document_ids=jnp.asarray(ids),
        positions=jnp.arange(ids.shape[1], dtype=jnp.int32)[None],
    )
    steps = sum(name.startswith("metric.full_acc_") and name.endswith("_sum") for name in expected)
    unroll = Unroll(config=config, num_steps=steps, decay=DECAY, train_head=True)
    counts = [jnp.sum(supervised_rows(rows, t)).astype(jnp.float32) for t in range(steps)]
    weights = step_weights(unroll, jnp.stack(counts))

    def loss(learned):
        total, sums = unroll_loss(unroll, learned, frozen, head, rows, weights)
        return total / sums.count.astype(jnp.float32), sums

    (found, sums), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(learned)
    yield "loss", abs(float(found) - float(expected["loss"][0])), LOSS
    wrong = 0
    for step in range(steps):
        # The library counts a row only where all its steps before were right, too.
        metric = f"metric.full_acc_{step}_"
        wrong += int(sums.joint_correct[step]) != int(expected[f"{metric}sum"][0])
        wrong += int(sums.total[step]) != int(expected[f"{metric}total"][0])
    yield "counts", float(wrong), 0.0
    left = {name for name in expected if name.startswith("grad.")}
    for part in drafter_parts(config):
        if part.parameter not in grads:
            continue
        pieces = part.split(np.asarray(grads[part.parameter]))
        for (name, _), piece in zip(part.tensors, pieces, strict=True):
            wanted = expected[f"grad.{name}"]
            left.remove(f"grad.{name}")
            error = np.linalg.norm(piece - wanted.reshape(piece.shape)) / np.linalg.norm(wanted)
            yield f"gradient of {name}", float(error), GRADIENT
    if left:
        raise ValueError(f"gradients that were not compared: {sorted(left)}")


def _tensors(path: Path) -> dict[str, np.ndarray]:
    file = open_safetensors(path)
    return {name: np.asarray(file.read(name)) for name in file.tensors}
