"""Draw docs/round.png, the picture of one decoding round: python docs/draw_round.py."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

INK, REAL, MASK, BAD = "#222222", "#cfe3f7", "#ffe3b3", "#f3c9c9"
GOOD = "#cdebcd"


def box(axes, x, y, text, color, width=1.5):
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, 0.62, boxstyle="round,pad=0.02", facecolor=color, edgecolor=INK, lw=0.8
        )
    )
    axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=9, color=INK)


def row(axes, y, title, note, cells, start):
    axes.text(0.0, y + 0.44, title, fontsize=10.5, weight="bold", color=INK, va="center")
    axes.text(0.0, y + 0.10, note, fontsize=8.5, color="#555555", va="center")
    for index, (text, color) in enumerate(cells):
        if text:
            box(axes, start + index * 1.65, y, text, color)


def main():
    figure, axes = plt.subplots(figsize=(11, 4.1), dpi=150)
    axes.set_xlim(0, 14.6)
    axes.set_ylim(-0.3, 4.6)
    axes.axis("off")
    start = 4.3
    row(
        axes,
        3.6,
        "1  expand",
        "true hidden states, then K-1 masks",
        [("The", REAL), ("sea", REAL), ("[mask]", MASK), ("[mask]", MASK), ("[mask]", MASK)],
        start,
    )
    row(
        axes,
        2.5,
        "2  draft",
        "four layers, one pass, K tokens",
        [("", "white"), ("is", REAL), ("very", REAL), ("deep", REAL), ("blue", REAL)],
        start,
    )
    row(
        axes,
        1.4,
        "3  verify",
        "the target, one pass over K+1 rows",
        [("", "white"), ("is", GOOD), ("very", GOOD), ("wide", BAD), ("...", "white")],
        start,
    )
    row(
        axes,
        0.3,
        "4  commit",
        "accepted drafts, one own token",
        [("", "white"), ("is", GOOD), ("very", GOOD), ("wide", REAL)],
        start,
    )
    for column, top in ((1, 3.6), (2, 3.6), (3, 3.6), (4, 3.6)):
        x = start + column * 1.65 + 0.75
        axes.annotate(
            "", (x, 3.16), (x, top - 0.03), arrowprops={"arrowstyle": "->", "color": INK, "lw": 0.8}
        )
        axes.annotate(
            "", (x, 2.06), (x, 2.47), arrowprops={"arrowstyle": "->", "color": INK, "lw": 0.8}
        )
    axes.text(
        start + 4 * 1.65,
        0.62,
        "three tokens for one target pass;\nthe text is the target's own",
        fontsize=9,
        color=INK,
        va="center",
    )
    figure.savefig(pathlib.Path(__file__).with_name("round.png"), bbox_inches="tight")


if __name__ == "__main__":
    main()
