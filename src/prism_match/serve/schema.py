"""What /openapi.json says of each address. Bodies are read by hand, so that too large a one is never read
to its end; FastAPI cannot see what is in them and is told here."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, Field

from prism_match.serve.answers import JSON, NPZ, PNG
from prism_match.serve.requests import FeatureOptions, MatchOptions

DESCRIPTION = (
    "Sub-pixel correspondences between two photos. Points are in pixels of the images as they are sent "
    "(turned upright if their EXIF says so); the centre of the top-left pixel is (0, 0). Where the server "
    "has a token, send it as 'Authorization: Bearer TOKEN'."
)
FORM = "multipart/form-data"
ABBREVIATED = "/9j/4AAQSkZJRgABAQ..."


class Error(BaseModel):
    error: str


class Times(BaseModel):
    """Seconds."""

    upload: float
    decode: float
    wait: float = Field(description="For the model to be free.")
    match: float = Field(description="Of all pairs that were matched together.")
    geometry: float | None = Field(None, description="Where it was asked for.")
    total: float
    stages: dict[str, float] = Field(description="Of match: backbone, MPMs, matching, refinement, polish.")


class Geometry(BaseModel):
    model: str
    matrix: list[list[float]] | None = Field(description="None where nothing fits.")
    inliers: list[bool]


class Details(BaseModel):
    keep0: list[list[list[int]]] = Field(description="For each MPM, rows of cells: 1 if kept.")
    keep1: list[list[list[int]]]


class Matched(BaseModel):
    keypoints0: list[tuple[float, float]]
    keypoints1: list[tuple[float, float]]
    scores: list[float] = Field(description="From 0 to 1, best first.")
    certainty: list[float] | None = Field(None, description="The probability to be within 3 pixels.")
    sigma: list[float] | None = Field(None, description="The expected error in pixels of image 1.")
    size0: tuple[int, int] = Field(description="Width, height.")
    size1: tuple[int, int]
    time: Times
    batch: int = Field(description="Requests that were matched together.")
    geometry: Geometry | list[Geometry] | None = Field(None, description="Where it was asked for.")
    same_place: float | None = Field(
        None, description="With a geometry: how likely both images show one place, where that is known."
    )
    details: Details | None = Field(None, description="Where they were asked for.")
    previews: list[str] | None = Field(None, description="PNG in base64, where they were asked for.")


class KeptKey(BaseModel):
    key: str
    size: tuple[int, int]
    bytes: int
    expires_in: float = Field(description="Seconds.")


def body(files: dict[str, str], options: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """A request with files, each with what it is, and options."""

    def schema(file: dict[str, str]) -> dict[str, Any]:
        properties = {name: {"type": "string", "description": text} | file for name, text in files.items()}
        return {"type": "object", "properties": properties | options.model_json_schema()["properties"]}

    content = {
        FORM: {"schema": schema({"format": "binary"})},
        JSON: {"schema": schema({"contentEncoding": "base64"}), "example": example},
    }
    return {"requestBody": {"required": True, "content": content}}


def errors(**sentences: str) -> dict[int | str, dict[str, Any]]:
    """By status, with an example each."""
    return {
        int(status[1:]): {
            "model": Error,
            "description": sentence,
            "content": {JSON: {"example": {"error": sentence}}},
        }
        for status, sentence in sentences.items()
    }


NO_TOKEN = {"_401": "a token is needed, as 'Authorization: Bearer TOKEN'"}
PROBLEMS = NO_TOKEN | {
    "_408": "the request did not arrive within 120 seconds",
    "_413": "image0: 12000x9000 is 108.0 megapixels; at most 50 are allowed",
    "_415": "image1: not an image of a known format",
    "_422": "threshold: input should be less than 1",
    "_503": "all 32 places are taken: try again later",
    "_504": "the request took longer than the 120 seconds allowed",
}
NO_KEY = {"_404": "key0: no features are kept under this key, or no longer"}
BINARY = {"schema": {"type": "string", "format": "binary"}}
MATCHED_EXAMPLE = {
    "keypoints0": [[103.5, 211.5], [119.5, 203.5]],
    "keypoints1": [[98.21, 240.87], [114.02, 231.4]],
    "scores": [0.97, 0.83],
    "certainty": [0.99, 0.96],
    "sigma": [0.41, 0.62],
    "size0": [640, 480],
    "size1": [640, 480],
    "time": {
        "upload": 0.002, "decode": 0.011, "wait": 0.0, "match": 0.092, "total": 0.105,
        "stages": {"backbone": 0.04, "MPMs": 0.035, "matching": 0.003, "refinement": 0.006, "polish": 0.008},
    },
    "batch": 1,
}  # fmt: skip

# `responses` is read by FastAPI alone; the answers are made by hand too.
PLAIN: dict[str, Any] = {"response_class": Response}
MATCH: dict[str, Any] = PLAIN | {
    "tags": ["matching"],
    "summary": "Match two images",
    "openapi_extra": body(
        {
            "image0": "The first image; or key0.",
            "image1": "The second image; or key1.",
            "mask0": "An image of the first one's size; look where it is not 0.",
            "mask1": "The same for the second image.",
        },
        MatchOptions,
        {"image0": ABBREVIATED, "image1": ABBREVIATED, "size": 832, "geometry": "homography"},
    ),
    "responses": {
        200: {
            "model": Matched,
            "description": "The matches, as Accept asks for them.",
            "content": {JSON: {"example": MATCHED_EXAMPLE}, NPZ: BINARY, PNG: BINARY},
        },
        **errors(**PROBLEMS, **NO_KEY, _406="answers are JSON, npz or PNG; Accept asks for none of them"),
    },
}
FEATURES: dict[str, Any] = PLAIN | {
    "tags": ["matching"],
    "summary": "Keep the features of an image",
    "status_code": 201,
    "openapi_extra": body({"image": "The image."}, FeatureOptions, {"image": ABBREVIATED, "size": 832}),
    "responses": {
        201: {
            "model": KeptKey,
            "description": "The key to give as key0 or key1.",
            "content": {
                JSON: {
                    "example": {
                        "key": "uVq0T3y0b1Ck3mS4cD5eFg",
                        "size": [640, 480],
                        "bytes": 52428800,
                        "expires_in": 600,
                    }
                }
            },
        },
        **errors(**PROBLEMS),
    },
}
FORGET: dict[str, Any] = PLAIN | {
    "tags": ["matching"],
    "summary": "Drop kept features",
    "status_code": 204,
    "responses": errors(**NO_TOKEN, **NO_KEY),
}
INFO: dict[str, Any] = PLAIN | {
    "tags": ["server"],
    "summary": "What the server is",
    "responses": errors(**NO_TOKEN),
}
HEALTH: dict[str, Any] = PLAIN | {"tags": ["server"], "summary": "Alive"}
READY: dict[str, Any] = PLAIN | {
    "tags": ["server"],
    "summary": "Ready",
    "responses": errors(_503="the model is not ready"),
}
METRICS: dict[str, Any] = PLAIN | {
    "tags": ["server"],
    "summary": "Metrics for Prometheus",
    "responses": errors(**NO_TOKEN),
}
