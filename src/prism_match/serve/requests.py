"""What clients send: files and options, as multipart/form-data or as JSON with the files in base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from prism_match.config import Rescale, Rotate, parse_json
from prism_match.serve.refusal import Gone, Refused

Options = TypeVar("Options", bound=BaseModel)
InThread = Callable[..., Coroutine[Any, Any, Any]]
FIELDS = 16  # more than there are
FIELD_BYTES = 1024


class FeatureOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: Annotated[int | None, Field(ge=32, description="Longer side to shrink to, in pixels.")] = None


class MatchOptions(BaseModel):
    """The options of `prism match` that are a client's to choose."""

    model_config = ConfigDict(extra="forbid")

    key0: Annotated[str | None, Field(max_length=64, description="Of kept features, in place of image0.")] = (
        None
    )
    key1: Annotated[str | None, Field(max_length=64, description="Of kept features, in place of image1.")] = (
        None
    )
    size: Annotated[
        int | None, Field(ge=32, description="Longer side to shrink images to, in pixels; not those of keys.")
    ] = None
    threshold: Annotated[
        float | None, Field(ge=0, lt=1, allow_inf_nan=False, description="Least confidence of a match.")
    ] = None
    max_matches: Annotated[
        int | None, Field(ge=1, description="Keep only so many, spread over the first image.")
    ] = None
    rotate: Annotated[
        Rotate | None, Field(description="Try the second image turned by 90, 180 and 270 degrees.")
    ] = None
    rescale: Annotated[Rescale | None, Field(description="Try images that hardly match at other scales.")] = (
        None
    )
    polish: Annotated[bool | None, Field(description="Make matches exact at the images' own size.")] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Field(description="To compute in; /v1/info lists those that the server offers."),
    ] = None
    geometry: Annotated[
        Literal["fundamental", "homography", "both"] | None,
        Field(description="Model to fit; tells the inliers. both: a list of the homography and the other."),
    ] = None
    details: Annotated[bool, Field(description="Also tell which cells were kept after each MPM.")] = False
    previews: Annotated[
        bool, Field(description="In JSON: also give both images as they were read, small, in base64.")
    ] = False


@dataclass
class Sent:
    files: dict[str, bytes] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def options(self, kind: type[Options]) -> Options:
        try:
            return kind.model_validate(self.values)
        except ValidationError as error:
            raise Refused(422, sentence(error, kind)) from error


class InMemory(MultiPartParser):
    spool_max_size = 2**62  # nothing of a request goes to disk


async def read_request(request: Request, files: Sequence[str], most: int, in_thread: InThread) -> Sent:
    """files: the names of fields that hold one. most: bytes in all."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            return await read_form(request, files, most)
        if kind == "application/json":
            body = b"".join([chunk async for chunk in limited(request, most)])
            return await in_thread(read_json, body, files)
    except ClientDisconnect as error:
        raise Gone from error
    raise Refused(415, "send multipart/form-data, or application/json with the files in base64")


async def limited(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > most:
            raise too_large(most)
        yield chunk


def too_large(most: int) -> Refused:
    return Refused(413, f"the request is too large: at most {most / 2**20:g} MiB are allowed")


async def read_form(request: Request, files: Sequence[str], most: int) -> Sent:
    parser = InMemory(
        request.headers,
        limited(request, most),
        max_files=len(files) + 1,
        max_fields=FIELDS,
        max_part_size=FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refused(422, f"the form cannot be read: {error.message}") from error
    except FormParserError as error:
        raise Refused(422, "the form cannot be read: Invalid multipart data.") from error
    sent = Sent()
    for name, value in form.multi_items():
        if name in sent.files or name in sent.values:
            raise Refused(422, f"{shown(name)}: was sent twice")
        if isinstance(value, UploadFile):
            if name not in files:
                raise Refused(422, f"{shown(name)}: no such file is expected, but {' and '.join(files)}")
            sent.files[name] = value.file.read()
            value.file.close()
        elif name in files:
            raise Refused(422, f"{name}: must be a file; paths and URLs are never read")
        else:
            sent.values[name] = value
    return sent


def read_json(body: bytes, files: Sequence[str]) -> Sent:
    try:
        values = parse_json(body)
    except ValueError as error:
        raise Refused(422, "the request is not valid JSON") from error
    if not isinstance(values, dict):
        raise Refused(422, "the request must be a JSON object")
    sent = Sent(values=values)
    for name in [name for name in files if name in values]:
        text = values.pop(name)
        try:
            sent.files[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise Refused(
                422, f"{name}: must be the bytes of an image in base64; paths and URLs are never read"
            ) from error
    return sent


def sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    name = shown(str(first["loc"][0])) if first["loc"] else "the options"
    if first["type"] == "extra_forbidden":
        return f"{name}: no such option; there are {', '.join(kind.model_fields)}"
    message = str(first["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}"


def shown(name: str) -> str:
    """A name that a client gave, fit for a sentence."""
    return "".join(c if c.isprintable() else "?" for c in name[:40])
