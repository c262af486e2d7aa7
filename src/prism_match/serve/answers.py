"""Matches as JSON, as an npz or as a picture, whichever the client wants."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from prism_match import viz
from prism_match.engine.photos import scale_points
from prism_match.geometry import Estimate
from prism_match.images import encode_png, resize
from prism_match.matches import Matches, belief_of, write_npz
from prism_match.serve.refusal import Refused

JSON, NPZ, PNG = "application/json", "application/x-npz", "image/png"
KINDS = (JSON, NPZ, PNG)  # the first where the client does not care
PICTURE = 800  # pixels, the longer side of each image in a picture


def chosen(accept: str | None) -> str:
    """The kind that an Accept header likes best."""
    if not accept or not accept.strip():
        return JSON
    entries = [entry(part) for part in accept.split(",")]
    ranks = {}
    for kind in KINDS:
        names = {kind: 2, kind.partition("/")[0] + "/*": 1, "*/*": 0}
        # Of the entries that a kind falls under, the most exact one counts.
        exactness, quality = max(((names[n], q) for n, q in entries if n in names), default=(0, 0.0))
        ranks[kind] = quality, exactness
    best = max(KINDS, key=lambda kind: ranks[kind])
    if ranks[best][0] <= 0:
        raise Refused(
            406, f"answers are {', '.join(KINDS[:-1])} or {KINDS[-1]}; Accept asks for none of them"
        )
    return best


def entry(part: str) -> tuple[str, float]:
    """Of an Accept header: a media type and its q."""
    name, *parameters = (x.strip().lower() for x in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, float(parameter[2:])
            except ValueError:
                return name, 0.0
    return name, 1.0


@dataclass(frozen=True)
class Answer:
    matches: Matches
    estimates: tuple[Estimate, ...]  # none, one, or the homography and the fundamental matrix
    seconds: dict[str, float]
    stages: dict[str, float]  # of seconds["match"]
    together: int
    thumbnails: tuple[np.ndarray | None, np.ndarray | None]
    previews: bool = False

    def encode(self, kind: str) -> bytes:
        return {JSON: self._json, NPZ: self._npz, PNG: self._png}[kind]()

    def _json(self) -> bytes:
        m = self.matches
        values: dict[str, Any] = {
            "keypoints0": m.keypoints0,
            "keypoints1": m.keypoints1,
            "scores": m.scores,
            "size0": list(m.size0),
            "size1": list(m.size1),
            "time": rounded(self.seconds) | {"stages": rounded(self.stages)},
            "batch": self.together,
        }
        values |= belief_of(m)
        fits = [
            {
                "model": fit.model,
                "matrix": fit.matrix,
                "inliers": fit.inliers,
            }
            for fit in self.estimates
        ]
        if fits:  # who wants to know of the geometry of the pair can wait for some milliseconds
            values["geometry"] = fits[0] if len(fits) == 1 else fits
            values["same_place"] = m.same_place
        if m.details is not None:
            keep = {"keep0": m.details.keep0, "keep1": m.details.keep1}
            values["details"] = {k: v.astype(int) for k, v in keep.items()}
        if self.previews:
            small = [encode_png(x) for x in self.thumbnails if x is not None]
            values["previews"] = [base64.b64encode(x).decode() for x in small]
        # With 3,000 matches, json would hold up the model's thread for 8 ms; this takes half of one.
        return orjson.dumps(values, np.ndarray.tolist, orjson.OPT_SERIALIZE_NUMPY)

    def _npz(self) -> bytes:
        more: dict[str, np.ndarray] = {}
        for fit in self.estimates:
            prefix = "" if len(self.estimates) == 1 else f"{fit.model}_"
            more[f"{prefix}inliers"] = fit.inliers
            if fit.matrix is not None:
                more[f"{prefix}matrix"] = fit.matrix
        file = io.BytesIO()
        write_npz(file, self.matches, **more)
        return file.getvalue()

    def _png(self) -> bytes:
        m, (first, second) = self.matches, self.thumbnails
        assert first is not None and second is not None
        title = f"{len(m)} matches" + "".join(
            f", {fit.num_inliers} inliers of the {fit.model} model" for fit in self.estimates
        )
        at0, at1 = (
            scale_points(points, size, small.shape[1::-1])  # type: ignore[arg-type]
            for points, size, small in ((m.keypoints0, m.size0, first), (m.keypoints1, m.size1, second))
        )
        picture = viz.draw_matches(first, second, at0, at1, m.scores, title=title, longer_side=PICTURE)
        return encode_png(picture)


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def thumbnail(rgb: np.ndarray) -> np.ndarray:
    """h w 3: as large as a picture needs it."""
    height, width = rgb.shape[:2]
    scale = min(PICTURE / max(width, height), 1.0)
    return resize(rgb, max(1, round(width * scale)), max(1, round(height * scale))).copy()
