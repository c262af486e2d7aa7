"""`prism demo`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

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

    OUT gets a folder for each pair: a motorcycle from two places, and a portrait with a part of it.

    \b
    Example:
      prism demo -o demo
    """
    import numpy as np

    from prism_match.evaluation.bundled import BUNDLED
    from prism_match.files import writable_folder
    from prism_match.images import load_image

    matcher = make_matcher(weights, model_config, device, "auto", size)
    folders = {name: writable_folder(out / name) for name in BUNDLED}
    results: dict[str, Any] = {}
    for name, pair in BUNDLED.items():
        with busy(f"matching {name}"):
            start = time.perf_counter()
            matches = matcher.match(*(load_image(path) for path in pair.photos), details=True)
            seconds = time.perf_counter() - start
        errors = pair.errors(matches.keypoints0, matches.keypoints1)
        known = errors[np.isfinite(errors)]
        estimate = matches.estimate(pair.geometry)
        files = write_results(matches, estimate, folders[name])
        result = summary(matches, estimate, matcher, seconds)
        result["known_truth"] = len(known)
        result["median_error_px"] = round(float(np.median(known)), 3) if len(known) else None
        result["within_3_px"] = round(float((known < 3).mean()), 4) if len(known) else None
        results[name] = result | {"files": [str(f) for f in files]}
        if not as_json:
            print(f"{name}: {pair.about}")
            report(results[name], as_json=False)
            print()
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        # as whoever has no PATH to it has called it
        called = sys.argv[0]
        if Path(called).name == "__main__.py":
            called = f"{sys.executable} -m prism_match"
        command = "prism" if shutil.which("prism") else called
        print(f"In the browser, with photos of yours: {command} app")
