"""Prompts to train on: the standard library's docstrings, short questions, requests by pattern.

Nothing here comes from HumanEval or MT-Bench; tests/examples/test_smollm2.py compares every run of
13 words. The lists are shuffled by one seed, so that any prefix of a file is a fair mixture.

    python -m examples.smollm2.prompts FOLDER
"""

import ast
import hashlib
import json
import random
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from peagle_jax.checkpoints.pip_download import pip_download

GREEDY_SHARE = 0.6
COUNTS = {"header": 1500, "docstring": 1150, "question": 1100, "code": 500, "request": 1100}
"""Prompts of each kind; the rest of the answers is Magpie's, which needs none."""

BATCH = 64  # prompts that are answered together
LONGEST = 480  # characters of a docstring
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip"}

ABOUT = (
    "What does a Python function called `{name}` do if its documentation says: {doc}",
    "Explain in simple words: {doc}",
    "Write a Python function `{name}` with this description: {doc}",
    "Give an example of how to use `{name}`. {doc}",
    "Summarize the following text in one sentence.\n\n{doc}",
    "Rewrite this documentation so that a beginner understands it: {doc}",
)

TASKS = (
    "adds two numbers", "returns the larger of three numbers", "reverses a string",
    "counts the words in a text", "checks if a number is even", "computes a factorial",
    "merges two dictionaries", "removes duplicates from a list", "finds the shortest word",
    "converts Celsius to Fahrenheit", "reads a file line by line", "sorts a list of tuples",
    "flattens a nested list", "counts the vowels in a string",
    "checks whether a year is a leap year",
    "prints a multiplication table", "finds the index of the largest element",
    "splits a list into chunks", "computes the average of a list", "capitalizes every word",
    "validates an email address", "generates a random password", "parses a CSV line",
    "computes the distance between two points", "rotates a list by n places",
    "finds the common elements of two lists", "converts a number to binary",
    "computes the area of a circle", "sums the digits of a number", "swaps two variables",
    "transposes a matrix", "searches a sorted list", "groups words by their length",
    "counts how often each letter occurs", "downloads a web page", "formats a date",
    "measures how long a function takes", "computes a running total", "picks a random element",
    "converts a list of strings to integers", "joins a list of strings with commas",
    "deletes all spaces from a text", "finds all numbers in a text", "draws a triangle of stars",
)  # fmt: skip
CODE = (
    "Write a Python function that {task}.",
    "Write a function in Python that {task}, with a docstring and type hints.",
    "How do I write code that {task} in Python?",
    "Give me a JavaScript function that {task}.",
    "Write a C++ program that {task}.",
    "Implement a Java method that {task} and explain it.",
    "Write a unit test for a Python function that {task}.",
    "Complete this Python code:\n\n# A function that {task}\ndef solve(",
    "Fix my Python function. It should be one that {task}, but it does not work.",
    "Show two different ways to write a Python function that {task}.",
    "Write a short Python class with a method that {task}.",
    "Write Python code that {task}. Only code, no explanation.",
)
TOPICS = (
    "the water cycle", "a lost cat", "the moon", "climate change", "a small bakery", "chess",
    "the French Revolution", "photosynthesis", "a rainy Monday", "electric cars", "inflation",
    "learning a language", "the ocean", "an old lighthouse", "public libraries", "vaccines",
    "a job interview", "bees", "the Roman Empire", "black holes", "time management", "coffee",
    "a mountain village", "artificial intelligence", "the human heart", "gardening", "bicycles",
    "a family dinner", "earthquakes", "the printing press", "music festivals", "solar energy",
    "a broken promise", "probability", "the stock market", "healthy sleep", "volcanoes",
    "a train journey", "social media", "democracy", "dinosaurs", "a new neighbor", "friendship",
    "supply and demand", "the Pythagorean theorem", "a haunted house", "remote work", "glaciers",
    "evolution", "a robot that paints", "teamwork", "the invention of the telephone", "rivers",
)  # fmt: skip
REQUESTS = (
    "Write a short story about {topic}.", "Write a poem about {topic}.",
    "Explain {topic} to a ten-year-old.", "Write a blog post about {topic}.",
    "Give me five facts about {topic}.", "What are the pros and cons of {topic}?",
    "Write an email to a colleague about {topic}.", "Make a quiz with three questions on {topic}.",
    "Pretend you are a teacher. Start a lesson on {topic}.", "Why does {topic} matter?",
    "Write a dialogue between two friends about {topic}.",
    "List the steps to learn more on {topic}.",
    "Describe {topic} as if you were a pirate.", "Compare {topic} with something similar.",
    "Draft an outline for an essay on {topic}.", "What is the history of {topic}?",
    "Extract three keywords from this sentence: I often think about {topic}.",
    "How would a scientist describe {topic}?", "Write a headline and a summary about {topic}.",
    "Solve a simple word problem about {topic} and show your steps.",
    "Make a table with two columns about {topic}.", "What would happen without {topic}?",
)  # fmt: skip

CORPUS = "chatterbot-corpus==1.3.3"
CORPUS_SHA256 = "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154"


def functions() -> Iterator[tuple[str, str, str]]:
    """Name, header with docstring, and the docstring's first paragraph, of library functions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if _SKIPPED & set(file.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text and 24 <= len(text) <= LONGEST:
                    first = " ".join(text.split("\n\n")[0].split())
                    yield node.name, _header(node, text), first


def _header(node: ast.FunctionDef, text: str) -> str:
    quoted = text.replace("\n", "\n    ")
    return f'def {node.name}({ast.unparse(node.args)}):\n    """\n    {quoted}\n    """\n'


def questions() -> list[str]:
    """First lines of the corpus' English conversations; none repeats.

    Raises:
        RuntimeError: the package cannot be fetched, or is another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        wheel = pip_download(
            CORPUS, Path(folder), title="Fetching questions", expected_bytes=345_706
        )
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != CORPUS_SHA256:
            raise RuntimeError(f"{wheel.name} is not the known {CORPUS}")
        found: dict[str, None] = {}
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if "/english/" in name and name.endswith(".yml"):
                    content = yaml.safe_load(archive.read(name))
                    found |= {str(talk[0]).strip(): None for talk in content["conversations"]}
    return [text for text in found if len(text) >= 8]


def make_prompts(seed: int = 0) -> list[dict[str, Any]]:
    """All prompts in one shuffled order: kind and messages of one user turn."""
    rng = random.Random(seed)
    library = list(dict.fromkeys(functions()))
    kinds = {
        "header": [header for _, header, _ in library],
        "docstring": [rng.choice(ABOUT).format(name=name, doc=doc) for name, _, doc in library],
        "question": questions(),
        "code": [form.format(task=task) for form in CODE for task in TASKS],
        "request": [form.format(topic=topic) for form in REQUESTS for topic in TOPICS],
    }
    chosen = []
    for kind, texts in kinds.items():
        rng.shuffle(texts)
        chosen += [
            {"kind": kind, "messages": [{"role": "user", "content": text}]}
            for text in texts[: COUNTS[kind]]
        ]
    rng.shuffle(chosen)
    return chosen


def write_prompts(
    folder: Path, wanted: Callable[[list[dict[str, Any]]], bool] = lambda messages: True
) -> None:
    """One file for each way of answering in `folder`: see PARTS of `examples.smollm2.run`.

    wanted: whether to keep a prompt, given its messages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = make_prompts()
    cut = round(GREEDY_SHARE * len(prompts))
    parts = {
        "code": [one for one in prompts[:cut] if one["kind"] in ("header", "code")],
        "chat": [one for one in prompts[:cut] if one["kind"] not in ("header", "code")],
        "sampled": prompts[cut:],
    }
    for name, part in parts.items():
        part = [one for one in part if wanted(one["messages"])]
        lines = (json.dumps(one, ensure_ascii=False) + "\n" for one in in_batches(part))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def in_batches(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts of similar length in each batch, so that little is padding; batches in any order."""
    ordered = sorted(prompts, key=lambda one: len(one["messages"][0]["content"]))
    batches = [ordered[at : at + BATCH] for at in range(0, len(ordered) - BATCH + 1, BATCH)]
    random.Random(1).shuffle(batches)
    rest = ordered[len(batches) * BATCH :]
    return [one for batch in batches for one in batch] + rest


if __name__ == "__main__":
    write_prompts(Path(sys.argv[1]))
