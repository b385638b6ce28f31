"""What evaluation asks: prompts of rows that have one, answers that the context holds."""

import dataclasses

import jax
import numpy as np
import pytest

from peagle_jax.decoding.params import SamplingParams
from tests.train import tiny_run
from train.cli import main
from train.data.prepared import PreparedWriter, open_prepared
from train.evaluate import evaluate, prompts_of
from train.recipe import DrafterPart
from train.warm_start import drafter_config, start_parameters, whole_drafter


def write(folder, masks):
    with PreparedWriter(folder, tiny_run.VOCAB) as writer:
        for mask in masks:
            writer.add(np.arange(len(mask)), np.array(mask, bool))
        writer.finish(digest="x", settings={}, report={}, draft_vocab_size=None)
    return open_prepared(folder)


def test_rows_without_prompt_or_answer_are_passed_over_and_named(tmp_path, capsys):
    data = write(tmp_path / "rows", [[1, 1], [0, 1], [0, 0], [0, 0, 1], [0, 1]])
    prompts, skipped = prompts_of(data, 2)
    assert prompts == [[0], [0, 1]]
    assert [text.split(":")[0] for text in skipped] == ["row 0", "row 2"]
    write(tmp_path / "none", [[1, 1], [0, 0]])
    given = ["evaluate", "head", "--target", "t", "--data", str(tmp_path / "none")]
    assert main(given) == 1
    error = capsys.readouterr().err
    assert "none: 2 rows passed over; row 0: a row without" in error
    assert "none: no row with a prompt and an answer" in error


def test_an_answer_may_fill_the_context_and_no_more():
    target = tiny_run.rule_target()
    target.config = dataclasses.replace(target.config, max_positions=62)
    config = drafter_config(
        target.config,
        DrafterPart(taps=(2, 3, 4), num_layers=1),
        mask_token_id=tiny_run.MASK_TOKEN,
        num_depths=2,
    )
    drafter = whole_drafter(config, start_parameters(config, target, jax.random.key(0)))
    prompts = [[1], [2, 3]]
    with pytest.raises(ValueError, match=r"61 \(--max-tokens\) do not fit .* to at most 60"):
        evaluate(target, drafter, prompts, [2], params=SamplingParams(max_tokens=61))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (found,) = evaluate(target, drafter, prompts, [2], params=params)
    assert found.tokens == 2 * 60
