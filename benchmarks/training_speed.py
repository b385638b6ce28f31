"""Sampled rows per second, forward and backward, on this CPU: ours or the public library's.

    python benchmarks/training_speed.py ours|library tiny|smollm2|smollm2-1k REPEATS

Prints one JSON list of rates. Both sides get one all-supervised sequence, the same sizes and the
same draw (nested rollouts, each depth kept with chance 0.8); weights are random on either side, as
they do not change the work. Each runs in a process of its own; `benchmarks.training` compares.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np

SIZES = {
    "tiny": {
        "hidden": 64,
        "inner": 128,
        "heads": 4,
        "kv": 2,
        "width": 16,
        "vocab": 512,
        "layers": 4,
        "rows": 512,
    },
    "smollm2": {
        "hidden": 576,
        "inner": 1536,
        "heads": 9,
        "kv": 3,
        "width": 64,
        "vocab": 49_152,
        "layers": 4,
        "rows": 256,
    },
}
SIZES["smollm2-1k"] = {**SIZES["smollm2"], "rows": 1024}  # fmt: skip
DEPTHS = 8


def draw(rows: int) -> np.ndarray:
    """Rollout length of each anchor."""
    rng = np.random.default_rng(0)
    lengths = np.zeros(rows, np.int32)
    alive = np.ones(rows, bool)
    for depth in range(1, DEPTHS):
        alive &= (rng.random(rows) < 0.8) & (np.arange(rows) + depth < rows)
        lengths += alive
    return lengths


def inputs(size: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    rows, hidden = size["rows"], size["hidden"]
    return {
        "tokens": rng.integers(0, size["vocab"] - 1, (1, rows)),
        "taps": rng.standard_normal((1, rows, 3 * hidden)).astype(np.float32),
        "last": rng.standard_normal((1, rows, hidden)).astype(np.float32),
    }


def ours(size: dict[str, int]) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp

    from peagle_jax.models.config import DrafterConfig, LayerConfig, RopeConfig
    from peagle_jax.models.drafter import init_drafter
    from train.objective import make_objective, value_and_grad
    from train.parameters import Trained, parameters_of, split
    from train.rows import TargetHead, TrainingRows
    from train.sampling import CodConfig

    layer = LayerConfig(
        num_heads=size["heads"], num_kv_heads=size["kv"], head_dim=size["width"], rope=RopeConfig()
    )
    config = DrafterConfig(
        vocab_size=size["vocab"],
        draft_vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        target_hidden_size=size["hidden"],
        layers=(layer,) * size["layers"],
        taps=(2, 6, 9),
        max_positions=4096,
        mask_token_id=size["vocab"] - 1,
    )
    params = parameters_of(init_drafter(config, jax.random.key(0)))
    learned, frozen = split(config, params, Trained(), jnp.float32)
    found, rows = inputs(size), size["rows"]
    batch = TrainingRows(
        tokens=jnp.asarray(found["tokens"], jnp.int32),
        taps=jnp.asarray(found["taps"]),
        last_hidden=jnp.asarray(found["last"]),
        loss_mask=jnp.ones((1, rows), bool),
        document_ids=jnp.zeros((1, rows), jnp.int32),
        positions=jnp.arange(rows, dtype=jnp.int32)[None],
    )
    head = TargetHead(matrix=params["head"])
    lengths = jnp.asarray(draw(rows))[None]
    objective = make_objective(config, CodConfig(num_depths=DEPTHS, ratio=0.8), rows)
    step = jax.jit(lambda *arrays: value_and_grad(objective, *arrays))
    return lambda: jax.block_until_ready(step(learned, frozen, head, batch, lengths))


def library(size: dict[str, int]) -> Callable[[], None]:
    import torch
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layers = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        head_dim=size["width"],
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    layers._attn_implementation = "sdpa"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=size["vocab"],
        mask_token_id=size["vocab"] - 1,
        embed_requires_grad=True,
        eagle_aux_hidden_state_layer_ids=[2, 6, 9],
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = core.PEagleDraftModel(config).float()
    lengths, rows, found = draw(size["rows"]), size["rows"], inputs(size)
    pairs = [(a, 0) for a in range(rows)]
    pairs += [(a, d) for d in range(1, DEPTHS) for a in range(rows) if lengths[a] >= d]
    anchors, depths = (torch.tensor(x) for x in np.array(pairs).T)
    core.generate_cod_sample_indices = lambda **_: (anchors, depths)
    loss_config = resolve_loss_config("kl_div", "eager")
    arguments = {
        "hidden_states": torch.tensor(found["taps"]),
        "input_ids": torch.tensor(found["tokens"]),
        "document_ids": torch.zeros(1, rows, dtype=torch.long),
        "loss_mask": torch.ones(1, rows, dtype=torch.bool),
        "verifier_last_hidden_states": torch.tensor(found["last"]),
        "num_depths": DEPTHS,
        "loss_config": loss_config,
    }

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**arguments)[1].backward()

    return step


def main() -> int:
    which, name, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    size = SIZES[name]
    step = {"ours": ours, "library": library}[which](size)
    elements = size["rows"] + int(draw(size["rows"]).sum())
    step()
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        rates.append(elements / (time.perf_counter() - started))
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
