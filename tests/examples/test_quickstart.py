"""The notebook runs from top to bottom, and what it says is so."""

import json
from pathlib import Path

import pytest

from examples.run_notebook import run_notebook
from peagle_jax.checkpoints.shipped_heads import find_shipped_head
from tests.smollm2_file import smollm2_gguf

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def outputs(notebook):
    return [one for cell in notebook["cells"] for one in cell.get("outputs", ())]


def test_the_notebook_runs_and_draws(monkeypatch):
    smollm2_gguf()
    assert find_shipped_head("smollm2-135m") is not None
    monkeypatch.setenv("QUICKSTART_TOKENS", "16")
    done = run_notebook(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    texts = "".join("".join(one["text"]) for one in outputs(done) if "text" in one)
    assert "identical to plain decoding: True" in texts
    assert "acceptance length" in texts
    assert sum("data" in one for one in outputs(done)) == 2


def test_the_committed_notebook_holds_its_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert sum("data" in one for one in outputs(notebook)) == 2
    assert all(c.get("execution_count") for c in notebook["cells"] if c["cell_type"] == "code")


def test_an_error_in_a_cell_is_not_hidden():
    cell = {"cell_type": "code", "source": ["print(1)\n", "1 / 0"]}
    with pytest.raises(ZeroDivisionError):
        run_notebook({"cells": [cell]})
