"""Numbers that others have published, to stand beside ours. AUC in percent."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    method: str
    auc: tuple[float, float, float]
    size: int | None = None  # where the numbers are for another size than the benchmark's usual one


# By benchmark and back end; "opencv" is OpenCV's RANSAC, "poselib" PoseLib's LO-RANSAC.
PUBLISHED: dict[str, dict[str, list[Row]]] = {
    "megadepth1500": {
        "opencv": [
            Row("PRISM (paper)", (60.0, 74.9, 85.1), 1152),
            Row("PRISM (paper)", (56.4, 71.6, 82.7), 832),
            Row("EfficientLoFTR", (56.4, 72.2, 83.5)),
            Row("LoFTR", (52.8, 69.2, 81.2)),
            Row("SP+LightGlue", (49.4, 67.2, 80.1)),
        ],
        "poselib": [
            Row("PRISM (paper)", (68.8, 80.6, 88.9), 1152),
            Row("EfficientLoFTR", (67.5, 79.1, 87.0)),
            Row("LoFTR", (64.3, 76.6, 85.3)),
            Row("SP+LightGlue", (66.3, 79.0, 87.9)),
        ],
    },
    "scannet1500": {
        "opencv": [
            Row("PRISM (paper)", (23.9, 41.8, 58.9)),
            Row("EfficientLoFTR", (19.2, 37.0, 53.6)),
            Row("LoFTR (MegaDepth weights)", (16.9, 33.6, 50.6)),
            Row("SP+SuperGlue", (16.2, 33.8, 51.8)),
        ]
    },
    "hpatches": {
        "opencv": [
            Row("PRISM (paper)", (71.9, 80.4, 88.3)),
            Row("EfficientLoFTR", (66.5, 76.4, 85.5)),
            Row("LoFTR", (65.9, 75.6, 84.6)),
        ]
    },
}

# PRISM with OpenCV's RANSAC at each size: AUC, then ms a pair and GiB on an A100.
RESOLUTION: dict[int, tuple[tuple[float, float, float], float, float]] = {
    640: ((52.9, 68.5, 80.2), 99.4, 5.4),
    832: ((56.4, 71.6, 82.7), 119.7, 7.7),
    960: ((58.3, 73.0, 83.6), 153.3, 9.9),
    1152: ((60.0, 74.9, 85.1), 209.1, 13.5),
}

# PRISM at 832 px by the pair's change of scale: at least this, and less than the next.
SCALE: dict[int, tuple[float, float, float]] = {
    1: (66.6, 79.2, 87.2),
    2: (61.9, 75.9, 85.2),
    3: (43.5, 60.7, 74.9),
    4: (27.4, 42.9, 57.4),
}

# Percent of queries within 0.25 m, 0.5 m and 1 m: InLoc at 10 degrees, Aachen at 2, 5 and 10.
LOCALIZATION: dict[str, dict[str, dict[str, str]]] = {
    "inloc": {
        "LoFTR": {"DUC1": "47.5/72.2/84.8", "DUC2": "54.2/74.8/85.5"},
        "SuperPoint + LightGlue": {"DUC1": "49.0/68.2/79.3", "DUC2": "55.0/74.8/79.4"},
        "PRISM (paper)": {"DUC1": "53.0/77.8/87.9", "DUC2": "54.2/72.5/83.2"},
    },
    "aachen": {
        "LoFTR": {"day": "88.7/95.6/99.0", "night": "78.5/90.6/99.0"},
        "SuperPoint + LightGlue": {"day": "89.2/95.4/98.5", "night": "87.8/93.9/100"},
        "PRISM (paper)": {"day": "89.4/96.2/99.3", "night": "78.5/91.1/99.5"},
    },
}

MASKS = {"megadepth": (55.08, 99.91), "scannet": (46.89, 92.32)}  # mIoU and average recall

# The paper's ablations by the name of our preset, at the size they were measured at.
ABLATION: dict[str, tuple[int, tuple[float, float, float]]] = {
    "paper": (1152, (60.0, 74.9, 85.1)),
    "absolute-positions": (1152, (57.3, 73.0, 83.9)),
    "no-pruning": (1152, (56.6, 72.6, 83.6)),
    "linear-attention": (1152, (55.3, 70.9, 82.9)),
    "single-level": (1152, (57.7, 73.2, 84.3)),
    "unweighted-softmax": (1152, (58.5, 73.4, 84.1)),
    "prune-last": (832, (54.6, 70.5, 81.8)),
    "cosine": (832, (54.7, 70.3, 81.9)),
}
