"""From prompts to the two heads that come with the package, one step after the other.

    python -m examples.smollm2.run FOLDER [--only STEP,STEP] [--train-rows N]

Steps: prompts, answers, collect, rows, states, p-eagle, eagle3, pack. One whose output is there
is skipped, an interrupted one goes on, so the command may be given again and again. The committed
answers.jsonl.gz stands for the first three: delete it to let the target answer anew, or give
--extend to answer the prompts that it lacks and add them to it. Everything else is made in FOLDER;
nothing of it needs to outlive the run but the heads.
"""

import argparse
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.smollm2.prompts import BATCH, write_prompts
from train.cli import main as train

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.jsonl.gz"
TARGET = "smollm2-135m"
FITS = {
    "p-eagle": ("p-eagle-1", "p-eagle-2", "p-eagle-3"),
    "eagle3": ("eagle3-1", "eagle3-2"),
}
"""Runs of each head, one after the other: NAME.toml here, folder NAME and head NAME-head. The first
ones draft one token, so that their acceptance length is at most 2."""
STEPS = ("prompts", "answers", "collect", "rows", "states", *FITS, "pack")

PARTS = {
    "code": ["--max-tokens", "96"],
    "chat": ["--max-tokens", "64"],
    "sampled": ["--max-tokens", "64", "--temperature", "0.8", "--seed", "100000"],
    "magpie": ["--magpie", "64", "--max-tokens", "64", "--seed", "200000"],
}
"""How each file of prompts is answered. Short answers: the heads are measured on 128 tokens, and
longer rows of the same text come from a first batch that the collected file keeps."""

MAX_LENGTH = 192  # tokens kept of a row
VALIDATION_ROWS = 20
TRAIN_ROWS = 1597  # those behind the heads that come with the package
DRAFT_VOCAB = 8192
MASK_TOKEN = 16  # <empty_output>, which no text uses


def make_prompts(folder: Path) -> None:
    """The files of prompts, without those that ANSWERS has an answer to."""
    from peagle_jax.loading import find_target
    from peagle_jax.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(find_target(TARGET))
    answered = {tuple(row["ids"][: row["prompt_tokens"]]) for row in read_answers()}
    write_prompts(
        folder / "prompts",
        lambda messages: tuple(tokenizer.apply_chat_template(messages)) not in answered,
    )


def make_answers(folder: Path) -> None:
    """The target's answers to each file of prompts, appended batch by batch."""
    (folder / "answers").mkdir(exist_ok=True)
    for name, options in PARTS.items():
        prompts = folder / "prompts" / f"{name}.jsonl"
        if name != "magpie" and not prompts.stat().st_size:
            continue  # all of them are answered already
        sources = [] if name == "magpie" else [str(prompts)]
        output = str(folder / "answers" / f"{name}.jsonl")
        options = [*options, "--drafter", "none", "--batch-size", str(BATCH)]
        call("regenerate", *sources, "--target", TARGET, "--output", output, *options)


def collect(folder: Path, more: list[Path]) -> None:
    """All answers as ids into ANSWERS, behind those it has. more: files of ids made before."""
    from peagle_jax.loading import find_target
    from peagle_jax.text.tokenizer import load_tokenizer
    from train.data.preparation import PrepareSettings, prepare

    rows = {tuple(row["ids"][: row["prompt_tokens"]]): row for row in read_answers()}
    for path in more:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            names = ("source", "temperature", "prompt_tokens", "ids")
            rows[tuple(row["ids"][: row["prompt_tokens"]])] = {name: row[name] for name in names}
    tokenizer = load_tokenizer(find_target(TARGET))
    for file in sorted((folder / "answers").glob("*.jsonl")):
        settings = PrepareSettings(max_length=640, vocab_size=tokenizer.vocab_size)
        data, _ = prepare([file], tokenizer, folder / "collected" / file.stem, settings)
        for index in range(len(data)):
            sample = data[index]
            ids, prompt = sample.tokens.tolist(), int(sample.loss_mask.argmax())
            temperature = 0.8 if file.stem == "sampled" else 0.0
            row = {"source": file.stem, "temperature": temperature, "prompt_tokens": prompt}
            rows.setdefault(tuple(ids[:prompt]), row | {"ids": ids})
    # No time stamp in the file: the same answers are the same bytes.
    # The old file stays until the new one is whole.
    partial = ANSWERS.with_suffix(".partial")
    with partial.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        for row in rows.values():
            file.write((json.dumps(row, separators=(",", ":")) + "\n").encode())
    partial.replace(ANSWERS)


def read_answers() -> list[dict[str, Any]]:
    """The rows of ANSWERS, if it is there: ids, prompt_tokens, source, temperature."""
    if not ANSWERS.is_file():
        return []
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def in_turns(rows: list[dict[str, Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of every source in turns, so that the first N are as varied as N rows can be."""
    shuffled = random.Random(seed).sample(rows, len(rows))
    sources = sorted({row["source"] for row in rows})
    lists = [[row for row in shuffled if row["source"] == source] for source in sources]
    for group in itertools.zip_longest(*lists):
        yield from (row for row in group if row is not None)


def make_rows(folder: Path, train_rows: int) -> None:
    """`validation` and `train` rows to be captured; `rows`, all others, for the vocabulary."""
    ordered = list(in_turns(read_answers()))
    parts = {"validation": ordered[:VALIDATION_ROWS], "rows": ordered[VALIDATION_ROWS:]}
    parts["train"] = parts["rows"][:train_rows]
    for name, rows in parts.items():
        file = folder / f"{name}.jsonl"
        lines = "".join(
            json.dumps({k: row[k] for k in ("ids", "prompt_tokens")}) + "\n" for row in rows
        )
        file.write_text(lines, encoding="utf-8")
        options = ["--draft-vocab-size", str(DRAFT_VOCAB)] if name == "rows" else []
        options += ["--mask-token-id", str(MASK_TOKEN), "--max-length", str(MAX_LENGTH)]
        call("prepare", str(file), "--target", TARGET, "--output", str(folder / name), *options)


def capture(folder: Path) -> None:
    for name, states in (("train", "states"), ("validation", "validation-states")):
        options = ["--output", str(folder / states), "--dtype", "bfloat16", "--batch-size", "8"]
        call("capture", str(folder / name), "--target", TARGET, *options)


def fit(folder: Path, name: str) -> None:
    """The runs of one head, each from the best checkpoint of the one before."""
    for run in FITS[name]:
        if not (folder / f"{run}-head").is_dir():
            # A process of its own: the log counts the CPU seconds of its process.
            fit = [sys.executable, "-m", "train.cli", "fit", str(HERE / f"{run}.toml"), "--resume"]
            status = subprocess.run(fit, cwd=folder, check=False).returncode
            if status:
                sys.exit(status)
            in_folder(folder, "export", run, f"{run}-head", "--dtype", "float32")


def in_folder(folder: Path, *arguments: str) -> None:
    """A command in FOLDER, which the recipes' paths start from."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        call(*arguments)
    finally:
        os.chdir(here)


def call(*arguments: str) -> None:
    """A `peagle-train` command, ending this one where it fails."""
    print("peagle-train", *arguments, file=sys.stderr, flush=True)
    status = train(arguments)
    if status:
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=STEPS)
    parser.add_argument(
        "--train-rows",
        type=int,
        default=TRAIN_ROWS,
        help=f"rows to capture and train on (default {TRAIN_ROWS}, as for the shipped heads; their "
        "222,000 tokens are captured at some 400 a second on two cores, in ten minutes)",
    )
    parser.add_argument("--extend", action="store_true", help="add answers to the committed ones")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="answers from before")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    asking = args.extend or not ANSWERS.is_file()
    if "prompts" in args.only and asking and not (folder / "prompts").is_dir():
        make_prompts(folder)
    if "answers" in args.only and asking:
        make_answers(folder)
    if "collect" in args.only and asking:
        collect(folder, args.more)
    if "rows" in args.only and not (folder / "train").is_dir():
        make_rows(folder, args.train_rows)
    if "states" in args.only:
        capture(folder)
    for name in FITS:
        if name in args.only:
            fit(folder, name)
    if "pack" in args.only:
        from examples.smollm2.pack import pack_heads

        pack_heads(folder)


if __name__ == "__main__":
    main()
