"""Run a notebook's cells from top to bottom in this process and keep what they print and draw.

    python -m examples.run_notebook examples/quickstart.ipynb

No Jupyter is needed: cells are plain Python, figures are those that matplotlib holds at `show`.
"""

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any


def run_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with fresh outputs. What a cell raises is raised, with the cell's number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {"__name__": "__main__"}
    pictures: list[str] = []

    def show() -> None:
        for number in pyplot.get_fignums():
            drawn = io.BytesIO()
            pyplot.figure(number).savefig(drawn, format="png", dpi=110)
            pictures.append(base64.b64encode(drawn.getvalue()).decode())
        pyplot.close("all")

    shown, pyplot.show = pyplot.show, show
    try:
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(cells, start=1):
            pictures.clear()
            printed = io.StringIO()
            code = compile("".join(cell["source"]), f"<cell {number}>", "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            cell["execution_count"] = number
            cell["outputs"] = [_text(printed.getvalue())] if printed.getvalue() else []
            cell["outputs"] += [_picture(data) for data in pictures]
    finally:
        pyplot.show = shown
    return notebook


def _text(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}


def _picture(data: str) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": {"image/png": data}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{path} is not a notebook: {error}")
    notebook = run_notebook(content)
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
