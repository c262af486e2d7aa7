"""`prism demo`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from prism_match.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutOption,
    SizeOption,
    WeightsOption,
    make_matcher,
)
from prism_match.cli.output import busy, report, summary, write_results


def demo(
    out: OutOption = Path("demo"),
    size: SizeOption = None,
    device: DeviceOption = "auto",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Match the photos that come with the package, whose geometry is known, and measure the error.

    \b
    Example:
      prism demo -o demo
    """
    import numpy as np

    from prism_match.files import writable_folder
    from prism_match.geometry import warp_points
    from prism_match.images import load_image

    assets = Path(__file__).parents[1] / "assets"
    matcher = make_matcher(weights, model_config, device, "auto", size)
    folder = writable_folder(out)
    with busy("matching"):
        start = time.perf_counter()
        photos = (load_image(assets / f"astronaut{n}.jpg") for n in (0, 1))
        matches = matcher.match(*photos, details=True)
        seconds = time.perf_counter() - start
    truth = warp_points(matches.keypoints0, np.loadtxt(assets / "astronaut_homography.txt"))
    errors = np.linalg.norm(matches.keypoints1 - truth, axis=1)
    estimate = matches.estimate("homography")
    files = write_results(matches, estimate, folder)
    result = summary(matches, estimate, matcher, seconds)
    result["median_error_px"] = round(float(np.median(errors)), 3) if len(errors) else None
    result["within_3_px"] = round(float((errors < 3).mean()), 4) if len(errors) else None
    report(result | {"files": [str(f) for f in files]}, as_json)
    if not as_json:
        command = (
            "prism" if shutil.which("prism") else sys.argv[0]
        )  # as whoever has no PATH to it has called it
        print(f"\nIn the browser, with photos of yours: {command} app")
