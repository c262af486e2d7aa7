"""From names on the command line to weighted sources of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from prism_match.errors import UserError
from prism_match.training.data.photometric import CALM
from prism_match.training.data.worlds.variety import Variety
from prism_match.training.feed import Captured, Weighted
from prism_match.training.pairs import PairSource

NEVER_WAIT = ("photos", "worlds", "colmap")  # kinds that live on the device alone
KINDS = ("photos", "worlds", "colmap", "megadepth", "rgbd")
LARGEST_SHARE = 10**6


@dataclass(frozen=True)
class SourceOptions:
    """What to train on. `mix` gives the share of each kind, as "photos=1,worlds=2"; a kind that is not named
    has 1, and several sources of a kind divide its share equally."""

    photos: Sequence[Path] = ()  # folders, tars, files
    worlds: bool = False  # textured with the photos
    colmap: Sequence[Path] = ()  # models with images/ and depth/ beside them
    megadepth: Path | None = None  # root of the data set, with index/ made by `prism data megadepth`
    rgbd: Sequence[Path] = ()  # sequences or folders of them
    mix: str = ""
    compile: bool = False  # compile and record, on a GPU, what renders photos and worlds
    photo_size: int = 448
    calm: float = CALM  # share of photo and world pairs that are changed little
    variety: Variety = field(default_factory=Variety)  # of the worlds


def make_sources(options: SourceOptions, device: torch.device) -> list[Weighted]:
    """All sources that the options ask for, on `device`. UserError, in one line, if one is unusable."""
    shares = parse_mix(options.mix)
    try:
        # What a thread compiles beside the training has to be recorded, which only a GPU can do.
        options = replace(options, compile=options.compile and device.type == "cuda")
        kinds = {k: v for k, v in _open(options, device).items() if v}
        if options.compile:
            kinds |= {k: [Captured(s) for s in kinds[k]] for k in NEVER_WAIT if k in kinds}
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    unused = sorted(set(shares) - set(kinds))
    if unused:
        raise UserError(f"--mix names {', '.join(unused)}, but there is no such source here")
    if not kinds:
        raise UserError("nothing to train on: give --photos, --worlds, --colmap, --megadepth or --rgbd")
    return [Weighted(s, shares.get(k, 1.0) / len(found)) for k, found in kinds.items() for s in found]


def _open(options: SourceOptions, device: torch.device) -> dict[str, list[PairSource]]:
    kinds: dict[str, list[PairSource]] = {}
    if options.worlds and not options.photos:
        raise UserError("--worlds needs --photos: the worlds are textured with them")
    if options.photos:
        from prism_match.training.data.photos import PhotoPairs, PhotoStore

        require(options.photos)
        store = PhotoStore.load(options.photos, options.photo_size).to(device)
        kinds["photos"] = [PhotoPairs(store, device, compile=options.compile, calm=options.calm)]
        if options.worlds:
            from prism_match.training.data.worlds.source import Worlds

            worlds = Worlds(
                store, device, compile=options.compile, calm=options.calm, variety=options.variety
            )
            kinds["worlds"] = [worlds]
    if options.colmap:
        from prism_match.training.data.colmap import Collection, ColmapPairs

        require(options.colmap)
        collections = [Collection(m, *colmap_folders(m)) for m in options.colmap]
        kinds["colmap"] = [ColmapPairs(collections, device)]
    if options.megadepth is not None:
        from prism_match.training.data.megadepth import MegaDepthPairs

        require([options.megadepth])
        index = sorted((options.megadepth / "index").rglob("*.npz"))
        if not index:
            raise UserError(f"{options.megadepth}/index: no scenes; run `prism data megadepth` first")
        kinds["megadepth"] = [MegaDepthPairs(options.megadepth, index, device)]
    if options.rgbd:
        from prism_match.training.data.rgbd import RGBDPairs

        require(options.rgbd)
        kinds["rgbd"] = [RGBDPairs(folder, device) for folder in options.rgbd]
    return kinds


def colmap_folders(model: Path) -> tuple[Path, Path]:
    """The images and depth maps that belong to a model: beside it, or in one of the two folders above."""
    for folder in (model, *model.resolve().parents[:2]):
        if (folder / "images").is_dir():
            return folder / "images", folder / "depth"
    raise UserError(f"{model}: no folder `images` in it or beside it")


def require(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")


def parse_mix(text: str) -> dict[str, float]:
    shares = {}
    for item in filter(None, text.replace(" ", ",").split(",")):
        kind, _, value = item.partition("=")
        try:
            shares[kind] = float(value)
        except ValueError:
            raise UserError(f"--mix {item}: expected KIND=NUMBER") from None
        if kind not in KINDS or not 0 <= shares[kind] <= LARGEST_SHARE:
            kinds = ", ".join(KINDS)
            raise UserError(f"--mix {item}: KIND is one of {kinds}, NUMBER from 0 to {LARGEST_SHARE:,}")
    return shares
