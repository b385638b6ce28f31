"""The best checkpoints as the heads of the package, with a card: data, recipe, figures, licence."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from examples.smollm2.run import FITS, MAX_LENGTH, TARGET, read_answers
from peagle_jax.checkpoints.load import load_target
from peagle_jax.checkpoints.shipped_heads import heads_folder, load_shipped_head, pack_head
from peagle_jax.decoding.params import SamplingParams
from peagle_jax.loading import find_target
from peagle_jax.models.target import Target
from train.assemble import assemble
from train.checkpoint import Checkpoints
from train.data.prepared import open_prepared
from train.evaluate import evaluate, prompt_of
from train.export import run_recipe, trained_drafter
from train.progress import read_log

PROMPTS, MAX_TOKENS, K = 8, 32, 5
DEFAULT_K = 1  # a second draft of heads trained this shortly is right in some 5 rounds of 100

CARD = """# {title} for SmolLM2-135M-Instruct

Drafts for `smollm2-135m`, which is the Q4_1 GGUF file of SmolLM2-135M-Instruct dequantised, not the
original weights. Trained by this project in half an hour of CPU time: a start, not a good head.

* **Data**: {answers} answers of the target itself (greedy and sampled) to prompts from Magpie, the
  standard library's docstrings, chatterbot-corpus and request patterns: `examples/smollm2`. No
  prompt shares 13 words in a row with HumanEval or MT-Bench. Captured and trained on: {rows} rows
  cut to {length} tokens, {passes} supervised tokens in {steps} steps, {cpu:.0f} CPU seconds in all.
* **Recipe**: {recipes}.
  {what}
* **Stored**: int8 with one scale for each output channel; embedding and head rows are the target's.
* **Figures**: acceptance length at K = {k}, {prompts} held-out prompts of {tokens} greedy tokens:
  {before:.3f} in float32, {after:.3f} as stored. MT-Bench and HumanEval: `benchmarks/results`.
* **Licence**: Apache-2.0, as the target.
"""
WHAT = {
    "p-eagle": "Four layers that start as the target's last four; depth 0 first, then 12 depths; "
    "draft\n  vocabulary of 8,192; of the embedding the mask token's row alone is learned; the "
    "head is frozen.",
    "eagle3": "One layer that starts as the target's last one; training-time test of one step, "
    "then of four;\n  draft vocabulary of 8,192; embedding and head are frozen.",
}


def pack_heads(folder: Path) -> None:
    """Write the head of each last run to `peagle_jax/data/heads`, in place of the one there.

    A run draws its curves when it ends; one that is still going is left out.
    """
    target = load_target(find_target(TARGET))
    for method, runs in FITS.items():
        if all((folder / name / "curves.png").is_file() for name in runs):
            _pack(folder, method, target)


def _pack(folder: Path, method: str, target: Target) -> None:
    runs = FITS[method]
    made, state, prompts, rows = _load(folder, runs[-1], target)
    asked = [prompt_of(prompts[row]) for row in range(min(PROMPTS, len(prompts)))]

    def acceptance_length(drafter: Any) -> float:
        params = SamplingParams(max_tokens=MAX_TOKENS)
        [found] = evaluate(
            target, drafter, asked, [K], params=params, method=method, batch_size=len(asked)
        )
        return found.stats.acceptance_length

    drafter = trained_drafter(made, state)
    drafter.config = dataclasses.replace(drafter.config, num_speculative_tokens=DEFAULT_K)
    output = heads_folder() / f"{TARGET}-{method}"
    pack_head(drafter, target, output, target_name=TARGET, overwrite=True)
    before, after = map(acceptance_length, (drafter, load_shipped_head(output, target)))
    facts = run_facts([folder / one for one in runs], int(state.step))
    card = CARD.format(
        title="A P-EAGLE head" if method == "p-eagle" else "An EAGLE-3 head",
        answers=len(read_answers()),
        rows=rows,
        length=MAX_LENGTH,
        recipes=", ".join(f"`examples/smollm2/{run}.toml`" for run in runs),
        what=WHAT[method],
        k=K,
        prompts=len(asked),
        tokens=MAX_TOKENS,
        before=before,
        after=after,
        **facts,
    )
    pack_head(drafter, target, output, target_name=TARGET, card=card, overwrite=True)
    print(json.dumps({"head": output.name, "before": before, "after": after, **facts}), flush=True)


def _load(folder: Path, name: str, target: Target) -> tuple[Any, Any, Any, int]:
    """The assembled run, its best state, the validation rows, and the number of training rows."""
    here = os.getcwd()
    os.chdir(folder)  # recipes name folders beside the run
    try:
        made = assemble(run_recipe(name), target)
        with Checkpoints(Path(name) / "checkpoints") as checkpoints:
            best = checkpoints.has_best()
            state, _ = checkpoints.restore(made.state, made.run.recipe, mesh=made.mesh, best=best)
        return made, state, open_prepared("validation"), len(open_prepared("train"))
    finally:
        os.chdir(here)


def run_facts(runs: list[Path], step: int) -> dict[str, Any]:
    """Steps and supervised tokens up to step `step` of the last run; CPU seconds of all of them."""
    steps, passes, cpu = 0, 0, 0.0
    for run in runs:
        records = read_log(run)
        train = [r for r in records if r["kind"] == "train"]
        if run == runs[-1]:
            train = [r for r in train if r["step"] <= step]
        steps += len(train)  # the recipes log every step
        passes += sum(r["supervised"] for r in train)
        cpu += records[-1]["cpu_seconds"]
    return {"steps": steps, "passes": f"{passes:,}", "cpu": cpu}
