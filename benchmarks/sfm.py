"""`prism sfm` beside COLMAP with SIFT, on scenes whose cameras are known.

python benchmarks/sfm.py DATA/strecha -o results
python benchmarks/sfm.py DATA/strecha -o results --stores stores --scenes fountain-P11 entry-P10

Every scene is a folder with `images` and `cameras.txt` (image fx fy cx cy R t, as Strecha's). Both get the
true intrinsics and the same mapper. With --stores DIR, matches come from DIR/SCENE.h5 or
DIR/SCENE/matches.h5, which `prism sfm --matches-only` has written, maybe on another machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.posed import read_cameras
from prism_match.evaluation.report import Table
from prism_match.files import writable_folder, write_json
from prism_match.geometry import align_similarity, camera_centres, rotation_angle
from prism_match.maps import colmap
from prism_match.maps.reconstruction import Stages


def main() -> None:
    args, more = arguments()
    scenes = [p.parent for p in sorted(args.data.glob("*/cameras.txt"))]
    scenes = [s for s in scenes if not args.scenes or s.name in args.scenes]
    if not scenes:
        raise UserError(f"{args.data}: no scene with a cameras.txt in it")
    rows: list[dict[str, Any]] = []
    for scene in scenes:
        for method, build in (("prism", build_prism), ("sift", build_sift)):
            if method not in args.methods:
                continue
            began = time.perf_counter()
            try:
                model = build(scene, writable_folder(args.out / scene.name / method), args, more)
                row = score(scene, model)
            except UserError as error:
                row = {"problem": str(error)}
            seconds = round(time.perf_counter() - began, 1)
            rows.append({"scene": scene.name, "method": method, **row, "seconds": seconds})
            print(rows[-1], file=sys.stderr)
            write_json(args.out / "sfm.json", rows)
    table = make_table(rows)
    print(table)
    (args.out / "sfm.md").write_text(table.markdown() + "\n", encoding="utf-8")


def arguments() -> tuple[argparse.Namespace, list[str]]:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=plain, epilog="Other options go to `prism sfm`."
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--stores", type=Path, help="folder of matches.h5 files, one for each scene")
    parser.add_argument("--scenes", nargs="*", default=[])
    parser.add_argument("--methods", nargs="+", choices=["prism", "sift"], default=["prism", "sift"])
    parser.add_argument("--mapper", choices=["incremental", "global"], default="incremental")
    parser.add_argument("--threads", type=int, default=-1)
    return parser.parse_known_args()


def build_prism(scene: Path, out: Path, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "prism_match", "sfm", str(scene / "images"), "-o", str(out),
        "--intrinsics", str(scene / "cameras.txt"), "--mapper", args.mapper, "--threads", str(args.threads),
        *more,
    ]  # fmt: skip
    if args.stores is not None:
        stores = [args.stores / f"{scene.name}.h5", args.stores / scene.name / "matches.h5"]
        found = [path for path in stores if path.is_file()]
        if not found:
            raise UserError(f"{args.stores}: no matches of {scene.name}")
        command += ["--matches", str(found[0])]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().splitlines()[-1])
    return Stages(out / "stages.json").done["model"]["result"]["models"][0]


def build_sift(scene: Path, out: Path, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    database = out / "database.db"
    database.unlink(missing_ok=True)
    k, _ = next(iter(read_cameras(scene / "cameras.txt").values()))
    params = [k[0, 0], k[1, 1], k[0, 2] + 0.5, k[1, 2] + 0.5]
    camera = {"model": "PINHOLE", "params": params}
    colmap.run(
        "sift", images=str(scene / "images"), database=str(database), camera=camera, threads=args.threads
    )
    result = colmap.run(
        "reconstruct", database=str(database), tracks=None, out=str(out / "sparse"), mapper=args.mapper,
        refine_intrinsics=False, threads=args.threads,
    )  # fmt: skip
    if not result["models"]:
        raise UserError("no model")
    return result["models"][0]


def score(scene: Path, model: dict[str, Any]) -> dict[str, Any]:
    truth = {name: pose for name, (_, pose) in read_cameras(scene / "cameras.txt").items()}
    found = {name: np.array(image["pose"]) for name, image in model["images"].items()}
    centres, rotations, relative = pose_errors(found, truth)
    return {
        "images": len(truth),
        "registered": model["registered"],
        "centre_median": float(np.median(centres)),
        "centre_max": float(centres.max()),
        "rotation_median": float(np.median(rotations)),
        "rotation_max": float(rotations.max()),
        "relative_rotation_median": float(np.median(relative)),
        "points": model["points"],
        "observations": model["observations"],
        "mean_track_length": model["mean_track_length"],
        "mean_reprojection_error": model["mean_reprojection_error"],
    }


def pose_errors(
    found: dict[str, np.ndarray], truth: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of cameras (world to camera, 3 4 or 4 4) after the centres are aligned by a similarity: distances of
    the centres, in units of the truth, and degrees between the rotations. Then, of every two cameras, the
    error in degrees of the rotation from one to the other, which no alignment is in: where the centres lie
    nearly on a line, they hardly tell how a scene is turned around it."""
    names = sorted(found)
    centres = [np.stack([camera_centres(poses[n]) for n in names]) for poses in (found, truth)]
    scale, rotation, translation = align_similarity(*centres)
    distances = np.linalg.norm(scale * centres[0] @ rotation.T + translation - centres[1], axis=1)
    angles = [rotation_angle(found[n][:3, :3] @ rotation.T, truth[n][:3, :3]) for n in names]
    turns = [found[n][:3, :3].T @ truth[n][:3, :3] for n in names]
    relative = [rotation_angle(a, b) for a, b in combinations(turns, 2)]
    return distances, np.array(angles), np.array(relative)


def make_table(rows: list[dict[str, Any]]) -> Table:
    columns = ["scene", "method", "registered", "centre (mm)", "max", "rotation (deg)", "max", "relative",
               "points", "track", "reproj. (px)", "s"]  # fmt: skip
    body = []
    for r in rows:
        if "problem" in r:
            body.append([r["scene"], r["method"], r["problem"], *[""] * 8, f"{r['seconds']:.0f}"])
            continue
        body.append([
            r["scene"], r["method"], f"{r['registered']}/{r['images']}",
            f"{1000 * r['centre_median']:.1f}", f"{1000 * r['centre_max']:.1f}",
            f"{r['rotation_median']:.3f}", f"{r['rotation_max']:.3f}",
            f"{r['relative_rotation_median']:.3f}", str(r["points"]), f"{r['mean_track_length']:.2f}",
            f"{r['mean_reprojection_error']:.3f}", f"{r['seconds']:.0f}",
        ])  # fmt: skip
    return Table(
        "camera errors after a similarity alignment: median and worst; median rotation between two cameras",
        columns,
        body,
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"sfm: {error}")
