"""Everything that needs pycolmap, in a process of its own: `python -m prism_match.maps.colmap_worker`.

Once pycolmap is imported, writing a PNG in the same process can abort it: pycolmap 4.2 brings a zlib of its
own whose symbols get mixed up with those of OpenCV and Pillow. So no other module imports pycolmap; they
call `prism_match.maps.colmap.run`, which starts this one. A job comes in as a line of JSON, what happens
goes out as lines of JSON: {"event": ...} while it runs and {"result": ...} or {"error": ...} at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.maps.shared_keypoints import load_tracks

HALF_PIXEL = 0.5  # COLMAP has the centre of the top-left pixel at (0.5, 0.5)
MIN_TRIANGULATION_ANGLES = (16.0, 8.0, 4.0)  # degrees, of the first pair; narrower where none is that wide
SEED = 0


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_caller, daemon=True).start()
    import pycolmap

    pycolmap.set_random_seed(SEED)
    pycolmap.logging.alsologtostderr = True
    try:
        emit({"result": JOBS[job.pop("job")](**job)})
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        emit({"error": str(error).strip() or type(error).__name__})


def end_with_caller() -> None:
    """Whoever asked for the job keeps our input open until it has the answer. One that was killed closes it:
    nobody waits any more, and the next run may be at work in the same folder."""
    os.read(sys.stdin.fileno(), 1)  # not by sys.stdin, whose lock would be in the way at the end
    os._exit(1)


def emit(message: dict[str, Any]) -> None:
    print("\n" + json.dumps(message), flush=True)  # on a line of its own, whatever COLMAP prints


def write_database(
    tracks: str, database: str, cameras: list[dict[str, Any]], images: dict[str, int], overwrite: bool
) -> dict[str, int]:
    """Keypoints and matches into a database, new or not. cameras: what pycolmap takes; images: which of them
    each has. Images that the database knows keep their cameras."""
    import pycolmap

    shared, _ = load_tracks(Path(tracks))
    with pycolmap.Database.open(database) as db, pycolmap.DatabaseTransaction(db):
        known = {image.name: image.image_id for image in db.read_all_images()}
        for image in db.read_all_images():
            if image.name in images:
                check_size(image.name, db.read_camera(image.camera_id), cameras[images[image.name]])
        # Asked for as COLMAP keeps them: an image that was found to have no keypoints has an entry, too.
        full = [name for name in images if name in known and db.exists_keypoints(known[name])]
        for a, b in shared.matches:
            if a in known and b in known and db.exists_matches(known[a], known[b]):
                full.append(a)
        if full and not overwrite:
            raise ValueError(f"{full[0]} has keypoints in this database already; --overwrite replaces them")
        if full:
            for clear in (db.clear_two_view_geometries, db.clear_matches, db.clear_descriptors):
                clear()
            db.clear_keypoints()
        ids: dict[int, int] = {}
        for name, camera in images.items():
            if name in known:
                continue
            if camera not in ids:
                ids[camera] = db.write_camera(pycolmap.Camera(**cameras[camera]))
            known[name] = db.write_image(pycolmap.Image(name=name, camera_id=ids[camera]))
        for name in images:
            found = shared.keypoints.get(name)
            xy = np.zeros((0, 2), np.float32) if found is None else found.xy
            db.write_keypoints(known[name], (xy + HALF_PIXEL).astype(np.float32))
        for (a, b), matches in shared.matches.items():
            db.write_matches(known[a], known[b], matches.index.astype(np.uint32))
        return {"images": db.num_images(), "keypoints": db.num_keypoints(), "matches": db.num_matches()}


def check_size(name: str, known: Any, matched: dict[str, Any]) -> None:
    """Keypoints of a photo of another size, or turned by EXIF, are none of the one in the database."""
    there, here = (known.width, known.height), (matched["width"], matched["height"])
    if there != here:
        sizes = [f"{width}x{height}" for width, height in (there, here)]
        turned = "; it is shown turned: tell with --images where it is" if there == here[::-1] else ""
        raise ValueError(f"{name} is {sizes[0]} in this database, its matches are for {sizes[1]}{turned}")


def verify(database: str, max_error: float) -> dict[str, Any]:
    """Geometric verification, `max_error` in pixels; the pairs that passed, with their number of inliers."""
    import pycolmap

    options = pycolmap.TwoViewGeometryOptions()
    options.ransac.max_error, options.ransac.random_seed = max_error, SEED
    pycolmap.geometric_verification(database, two_view_geometry_options=options)
    with pycolmap.Database.open(database) as db:
        names = {image.image_id: image.name for image in db.read_all_images()}
        pair_ids, counts = db.read_two_view_geometry_num_inliers()
        pairs = [(*pycolmap.pair_id_to_image_pair(p), n) for p, n in zip(pair_ids, counts, strict=True)]
    return {"verified": [[names[a], names[b], int(n)] for a, b, n in pairs if n > 0]}


def reconstruct(
    database: str,
    tracks: str | None,
    out: str,
    mapper: str,
    refine_intrinsics: bool,
    threads: int,
    max_error: float = 4.0,
    robust: float | None = None,
) -> dict[str, Any]:
    """Runs a mapper and writes its models to out/0, out/1, ... (largest first): bin, text and points.ply.
    tracks: the file that knows the colours of the keypoints, if any. max_error: pixels. robust: see `settle`,
    which is left out where there is none."""
    folder = Path(out)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if mapper == "incremental":
        models = incremental_models(database, folder, refine_intrinsics, threads, max_error)
    else:
        models = global_models(database, folder, refine_intrinsics, threads)
    for path in folder.iterdir():  # what the mapper itself has written, in its own order
        shutil.rmtree(path)
    ranked = sorted(models, key=lambda m: (-m.num_reg_images(), -m.num_points3D()))
    colours = {} if tracks is None else load_tracks(Path(tracks))[1]
    for n, model in enumerate(ranked):
        if robust is not None:
            settle(model, refine_intrinsics, threads, robust)
            if drop_impossible(model):  # without what they had made of their points
                settle(model, refine_intrinsics, threads, robust)
        drop_impossible(model)
        colour_points(model, colours)
        target = folder / str(n)
        target.mkdir()
        model.write_binary(target)
        model.write_text(target)
        model.export_PLY(target / "points.ply")
    return {"models": [describe(model) for model in ranked]}


def incremental_models(
    database: str, folder: Path, refine: bool, threads: int, max_error: float
) -> list[Any]:
    import pycolmap

    with pycolmap.Database.open(database) as db:
        images = db.num_images()
    options = pycolmap.IncrementalPipelineOptions()
    options.extract_colors = False
    options.min_model_size = min(3, images)
    options.num_threads, options.random_seed = threads, SEED
    options.ba_refine_focal_length = options.ba_refine_extra_params = refine
    options.mapper.abs_pose_refine_focal_length = options.mapper.abs_pose_refine_extra_params = refine
    options.mapper.init_max_error = options.mapper.filter_max_reproj_error = max_error
    options.triangulation.merge_max_reproj_error = max_error
    options.triangulation.complete_max_reproj_error = max_error
    # Two images have no other tracks.
    options.triangulation.ignore_two_view_tracks = images > 2

    def registered() -> None:
        emit({"event": "image"})

    for angle in MIN_TRIANGULATION_ANGLES:
        options.mapper.init_min_tri_angle = angle
        models = pycolmap.incremental_mapping(
            database, ".", folder, options,
            initial_image_pair_callback=registered, next_image_callback=registered,
        )  # fmt: skip
        if with_points(models):
            break
    return with_points(models)


def global_models(database: str, folder: Path, refine: bool, threads: int) -> list[Any]:
    import pycolmap

    options = pycolmap.GlobalPipelineOptions()
    options.num_threads, options.random_seed = threads, SEED
    adjustment = options.mapper.bundle_adjustment
    adjustment.refine_focal_length = adjustment.refine_extra_params = refine
    return with_points(pycolmap.global_mapping(database, ".", folder, options))


def settle(model: Any, refine: bool, threads: int, error: float) -> None:
    """A last bundle adjustment, in which keypoints that are off by more than `error` pixels count ever less.
    Most points of a dense matcher are exact and some, on walls without texture, are not; the adjustments of
    the mapper, made for corners, listen to all of them alike."""
    import pycolmap

    options = pycolmap.BundleAdjustmentOptions()
    options.refine_focal_length = options.refine_extra_params = refine
    options.ceres.loss_function_type = pycolmap.LossFunctionType.CAUCHY
    options.ceres.loss_function_scale = error
    options.ceres.solver_options.num_threads = threads
    options.print_summary = False
    pycolmap.bundle_adjustment(model, options)
    model.update_point_3d_errors()


def drop_impossible(model: Any) -> int:
    """Takes out images whose cameras cannot be, and says how many. An adjustment that is free to choose a
    focal length may make a negative one of a photo that few points hold; nobody could read such a model."""
    import pycolmap

    impossible = set()
    for number, camera in model.cameras.items():
        focal = np.array(camera.params)[list(camera.focal_length_idxs())]
        if not (np.isfinite(camera.params).all() and (focal > 0).all()):
            impossible.add(number)
            usual = 1.2 * max(camera.width, camera.height)
            name = camera.model.name
            fresh = pycolmap.Camera.create_from_model_name(number, name, usual, camera.width, camera.height)
            camera.params = list(fresh.params)  # the file holds all cameras, also those of no image
    frames = {
        model.images[n].frame_id for n in model.reg_image_ids() if model.images[n].camera_id in impossible
    }
    for frame in frames:
        model.deregister_frame(frame)
    return len(frames)


def with_points(models: dict[int, Any]) -> list[Any]:
    """Cameras that have turned but not moved are put anywhere, around no point at all."""
    return [model for model in models.values() if model.num_points3D()]


def colour_points(model: Any, colours: dict[str, np.ndarray]) -> None:
    """The mean colour of the keypoints of each point."""
    for _, point in model.points3D.items():
        seen = [(model.images[e.image_id].name, e.point2D_idx) for e in point.track.elements]
        known = [colours[name][n] for name, n in seen if name in colours]
        if known:
            point.color = np.mean(known, axis=0).round().astype(np.uint8)


def describe(model: Any) -> dict[str, Any]:
    """The model in plain numbers: cameras and poses (world to camera, 3 4), in COLMAP's conventions."""
    cameras = {
        str(n): {"model": c.model_name, "width": c.width, "height": c.height, "params": c.params.tolist()}
        for n, c in model.cameras.items()
    }
    images = {}
    for n in model.reg_image_ids():
        image = model.images[n]
        images[image.name] = {
            "camera": str(image.camera_id),
            "pose": image.cam_from_world().matrix().tolist(),
            "points": image.num_points3D,
        }
    return {
        "registered": len(images),
        "points": model.num_points3D(),
        "observations": model.compute_num_observations(),
        "mean_track_length": model.compute_mean_track_length(),
        "mean_reprojection_error": model.compute_mean_reprojection_error(),
        "cameras": cameras,
        "images": dict(sorted(images.items())),
    }


def sift(images: str, database: str, camera: dict[str, Any], threads: int) -> dict[str, Any]:
    """COLMAP's own features and exhaustive matches of a folder, all images with one camera."""
    import pycolmap

    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = camera["model"]
    reader.camera_params = ",".join(map(str, camera["params"]))
    extraction = pycolmap.FeatureExtractionOptions()
    extraction.num_threads, extraction.use_gpu = threads, False
    matching = pycolmap.FeatureMatchingOptions()
    matching.num_threads, matching.use_gpu = threads, False
    mode = pycolmap.CameraMode.SINGLE
    pycolmap.extract_features(
        database, images, camera_mode=mode, reader_options=reader, extraction_options=extraction
    )
    pycolmap.match_exhaustive(database, matching_options=matching)
    with pycolmap.Database.open(database) as db:
        return {"images": db.num_images(), "keypoints": db.num_keypoints(), "matches": db.num_matches()}


def undistort(model: str, images: str, out: str) -> dict[str, Any]:
    """The photos of a model without their lens distortion, and the model that fits them."""
    import pycolmap

    pycolmap.undistort_images(out, model, images)
    return {}


def pinhole_model(model: str, keep: list[str], size: int, out: str) -> dict[str, Any]:
    """Writes the model of some of the images as it would be seen without lens distortion, in images whose
    longer side has at most `size` pixels. The photos themselves are left to the caller, who reads more
    formats than COLMAP does."""
    import pycolmap

    scene = pycolmap.Reconstruction(model)
    kept = set(keep)
    for image in [scene.images[n] for n in scene.reg_image_ids()]:
        if image.name not in kept:
            scene.deregister_frame(image.frame_id)
    options = pycolmap.UndistortCameraOptions()
    options.max_image_size = size
    ideal = {n: pycolmap.undistort_camera(options, camera) for n, camera in scene.cameras.items()}
    for n in scene.reg_image_ids():
        image = scene.images[n]
        old, new = scene.cameras[image.camera_id], ideal[image.camera_id]
        for point in image.points2D:
            ray = old.cam_from_img(point.xy)
            if ray is not None:
                point.xy = new.img_from_cam(np.append(ray, 1.0))
    for n, camera in ideal.items():
        there = scene.cameras[n]
        there.model, there.width, there.height = camera.model, camera.width, camera.height
        there.params = list(camera.params)
    scene.update_point_3d_errors()
    scene.write_binary(out)
    return describe(scene)


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "database": write_database,
    "verify": verify,
    "reconstruct": reconstruct,
    "sift": sift,
    "undistort": undistort,
    "pinhole_model": pinhole_model,
}

if __name__ == "__main__":
    main()
