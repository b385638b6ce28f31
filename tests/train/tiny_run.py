"""A tiny target that follows a rule, data that follow it, and recipes to train on them.

The target writes the next token of a fixed permutation, whatever came before: its layers add
nothing to the residual stream, and its head undoes the embedding. A drafter must learn to apply the
permutation one to K times, by depth.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from peagle_jax.models.config import LayerConfig, RopeConfig, TargetConfig
from peagle_jax.models.target import Target
from train.data.prepared import PreparedWriter
from train.recipe import Recipe, parse

VOCAB, HIDDEN, WORDS = 20, 32, 16
MASK_TOKEN = 19
NUM_DEPTHS = 4


def rule() -> np.ndarray:
    """Next token of each token; a permutation of the first 16, one cycle."""
    order = np.random.default_rng(3).permutation(WORDS)
    following = np.arange(VOCAB)
    following[order] = np.roll(order, -1)
    return following


def rule_target() -> Target:
    """The target that follows `rule` greedily; it is quite sure, but not certain."""
    layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
    config = TargetConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        layers=(layer,) * 6,
        max_positions=256,
        norm_eps=1e-5,
        norm_cast="before_weight",
    )
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((HIDDEN, HIDDEN)))[0][:VOCAB]
    head = np.zeros((HIDDEN, VOCAB))
    head[:, rule()] = basis.T

    def source(name, shape, dtype):
        last = name.rsplit(".", 1)[-1]
        if last.endswith("norm"):
            value = np.ones(shape)
        elif name == "embedding":
            value = basis
        elif name == "head":
            value = head * 1.5
        elif last in ("o", "down"):
            value = np.zeros(shape)
        else:
            value = rng.standard_normal(shape) * 0.1
        return jnp.asarray(value, dtype)

    return Target(config, dtype=jnp.float32, source=source)


def write_data(folder: Path, *, rows: int = 48, seed: int = 0, length: int = 20) -> Path:
    """Rows of random prompts of 2 to 5 tokens and answers by the rule."""
    rng = np.random.default_rng(seed)
    following = rule()
    with PreparedWriter(folder, VOCAB) as writer:
        for _ in range(rows):
            prompt = rng.integers(0, WORDS, rng.integers(2, 6)).tolist()
            tokens = list(prompt)
            while len(tokens) < length:
                tokens.append(int(following[tokens[-1]]))
            mask = np.arange(length) >= len(prompt)
            writer.add(np.array(tokens), mask)
        writer.finish(digest=f"rule {seed} {rows} {length}", settings={}, report={},
                      draft_vocab_size=WORDS)  # fmt: skip
    return folder


def recipe(data: Path, folder: Path, /, **sections: dict) -> Recipe:
    """A recipe for the tiny target; sections override its keys."""
    content: dict[str, dict] = {
        "target": {"path": "rule"},
        "data": {"path": str(data), "sequence_length": 42, "read_threads": 0},
        "drafter": {"num_layers": 1, "taps": [2, 3, 4], "mask_token_id": MASK_TOKEN},
        "objective": {"num_depths": NUM_DEPTHS, "chunk_rows": 48},
        "optimizer": {"learning_rate": 1e-2, "warmup_ratio": 0.05, "schedule": "cosine"},
        "train": {"steps": 6, "global_batch": 8, "dtype": "float32"},
        "output": {
            "folder": str(folder),
            "save_every": 0,
            "validate_every": 0,
            "log_every": 1,
            "picture": False,
        },
    }
    for name, keys in sections.items():
        content.setdefault(name, {}).update(keys)
    return parse(Recipe, content, "")
