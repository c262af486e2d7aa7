"""Draws how far what a calibration states is true, on pairs that it was not fitted to.

python benchmarks/reliability.py src/prism_match/weights/calibration.json -o docs/images/reliability.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TITLES = {
    "matches": "certainty of matches",
    "points": "certainty of points that were located",
    "places": "the same place",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("calibration", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    fitted = json.loads(args.calibration.read_text(encoding="utf-8"))["fitted"]
    draw({title: fitted[name] for name, title in TITLES.items() if name in fitted}, args.out)


def draw(fits: dict[str, dict], out: Path) -> None:
    """Each dot is a bin: what was stated, how much of it was true, and the larger the more fell into it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(fits), figsize=(3.6 * len(fits), 4), dpi=110, squeeze=False, layout="constrained"
    )
    for axis, (title, fit) in zip(axes[0], fits.items(), strict=True):
        stated, true, share = zip(*fit["reliability"], strict=True)
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        axis.plot(stated, true, linewidth=1)
        axis.scatter(stated, true, [20 + 400 * x for x in share], alpha=0.6)
        error = fit["expected_calibration_error"]
        axis.set(
            xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), aspect="equal", xlabel="stated", ylabel="true",
        )  # fmt: skip
        axis.set_title(f"{title}\nexpected calibration error {error:.3f}", fontsize=10)
    figure.savefig(out, bbox_inches="tight")


if __name__ == "__main__":
    main()
