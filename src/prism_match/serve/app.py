"""The HTTP API: what is asked for at which address, and the way of a request through the server.

A request takes a place before its body is read and gives it back when it is answered, or when its client goes
away; when all places are taken, the next one is told to come back later. So the memory that requests can take
is bounded. Photos are decoded in a few threads, then wait for the model, which takes what waits at once."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import PIL.Image
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from prism_match import __version__
from prism_match.errors import UserError
from prism_match.images import Image
from prism_match.matcher import ImageFeatures, PairMatcher, Prepared
from prism_match.serve import schema
from prism_match.serve.answers import PNG, Answer, chosen, thumbnail
from prism_match.serve.batches import Manner, ModelThread
from prism_match.serve.kept import Kept, KeptFeatures
from prism_match.serve.metrics import Metrics
from prism_match.serve.pages import add_pages, examples
from prism_match.serve.photos import FORMATS, read_photo
from prism_match.serve.refusal import Gone, Refused, complain
from prism_match.serve.requests import FeatureOptions, MatchOptions, Sent, read_request, too_large
from prism_match.serve.settings import MIB, ServeSettings, is_local
from prism_match.weights import SHIPPED

Result = TypeVar("Result")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
GONE = 499  # what nginx calls it; nobody gets to see it but the metrics


class Service:
    """What the requests of one server share."""

    def __init__(self, matcher: PairMatcher, settings: ServeSettings):
        self.matcher, self.settings = matcher, settings
        self.max_size = max(settings.max_size, matcher.size)
        self.metrics = Metrics()
        # On a CPU, where a pair takes seconds, the first of a batch would wait for the last.
        self.batch = settings.batch or (8 if matcher.device.type == "cuda" else 1)
        self.model = ModelThread(matcher, self.batch, self.metrics.batch)
        self.kept = KeptFeatures(int(settings.features_mib * MIB), settings.features_seconds)
        self.pool = ThreadPoolExecutor(settings.decoders, "prism-photos")
        self.taken = 0  # places
        self.stopping = False
        watch = self.metrics.watch
        watch("prism_places_taken", "Requests on their way.", lambda: self.taken)
        watch("prism_places", "Requests that there is room for.", lambda: settings.places)
        watch("prism_waiting", "Requests that wait for the model.", self.model.waiting)
        watch("prism_kept_features", "Photos whose features are kept.", lambda: len(self.kept))
        watch("prism_kept_bytes", "Bytes of features that are kept.", lambda: self.kept.used)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.model.start()
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            yield
        finally:
            self.stopping = True
            sweeper.cancel()
            await asyncio.get_running_loop().run_in_executor(None, self.model.stop)
            self.pool.shutdown(cancel_futures=True)

    async def _sweep(self) -> None:
        """What has expired goes, also when nobody asks for it."""
        while True:
            await asyncio.sleep(min(10.0, max(0.1, self.settings.features_seconds / 4)))
            self.kept.expire()

    async def in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.pool, partial(work, *args))

    def authorize(self, request: Request) -> None:
        token = self.settings.token
        if token:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), token.encode())
            if kind.lower() != "bearer" or not right:
                raise Refused(
                    401, "a token is needed, as 'Authorization: Bearer TOKEN'", WWW_Authenticate="Bearer"
                )
            return
        # Without a token only this machine can connect, but its browser may do so for a page from anywhere,
        # under a name that leads here.
        host = request.headers.get("host", "")
        name = parts_of(f"//{host}").hostname
        own = self.settings.host
        if name not in LOCAL_NAMES and not (name == own.lower() and is_local(own)):
            raise Refused(403, "without a token, the server answers to localhost only")
        origin = request.headers.get("origin")
        if origin is not None and parts_of(origin).netloc != host:
            raise Refused(403, "without a token, the server does not answer pages of other sites")

    @contextlib.contextmanager
    def place(self) -> Any:
        if self.stopping:
            raise Refused(503, "the server is shutting down", Retry_After="5")
        wait, limit = self.taken * self.model.pace, self.settings.timeout
        later = str(min(60, max(1, round(wait))))
        if self.taken >= self.settings.places:
            raise Refused(
                503, f"all {self.settings.places} places are taken: try again later", Retry_After=later
            )
        if wait > limit:  # better told at once than in the end
            raise Refused(
                503,
                f"it would take longer than the {limit:g} seconds allowed: try again later",
                Retry_After=later,
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    async def answer(
        self,
        request: Request,
        endpoint: str,
        files: tuple[str, ...],
        work: Callable[[Sent, float], Coroutine[Any, Any, Response]],
    ) -> Response:
        """The way of every request that has a body. work: gets what was sent, and the seconds that took."""
        start = time.perf_counter()
        most, limit = self.settings.max_bytes, self.settings.timeout
        response: Response
        try:
            self.authorize(request)
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length) > most:
                raise too_large(most)
            with self.place():
                try:
                    sent = await asyncio.wait_for(read_request(request, files, most, self.in_thread), limit)
                except asyncio.TimeoutError as error:
                    raise Refused(408, f"the request did not arrive within {limit:g} seconds") from error
                uploaded = time.perf_counter() - start
                try:
                    response = await attended(request, work(sent, uploaded), limit - uploaded, limit)
                finally:
                    sent.files.clear()  # what waits to be decoded for someone who is gone still knows them
        except Refused as refused:
            response = refuse(refused)
        except Gone:
            response = Response(status_code=GONE)
        except Exception as error:
            complain(f"{endpoint} failed", error)
            response = refuse(Refused(500, "the server failed on this request"))
        self.metrics.requests.labels(endpoint, str(response.status_code)).inc()
        self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - start)
        return response

    async def match(self, sent: Sent, uploaded: float, accept: str | None) -> Response:
        kind = chosen(accept)
        options = sent.options(MatchOptions)
        self.check_size(options.size)
        if options.precision is not None and options.precision not in self.matcher.precisions:
            offered = ", ".join(self.matcher.precisions)
            raise Refused(422, f"precision: the server offers {offered}, not {options.precision}")
        for n in (0, 1):
            given = (f"image{n}" in sent.files) + (getattr(options, f"key{n}") is not None)
            if given != 1:
                problem = "is missing" if not given else "were both sent"
                raise Refused(422, f"image{n} {'or' if not given else 'and'} key{n} {problem}")
        own = self.matcher
        manner = Manner(
            own.threshold if options.threshold is None else options.threshold,
            options.rotate or own.rotate,
            options.rescale or own.rescale,
            own.polish if options.polish is None else options.polish,
            options.details,
            options.precision or self.matcher.precisions[0],
        )
        small = kind == PNG or options.previews
        start = time.perf_counter()
        sides = await asyncio.gather(
            *(self._side(n, sent, options, manner, small) for n in (0, 1)), return_exceptions=True
        )
        sent.files.clear()  # before the model is waited for
        for side in sides:
            if isinstance(side, BaseException):
                raise side
        (first, thumbnail0), (second, thumbnail1) = sides  # type: ignore[misc]
        decoded = time.perf_counter() - start
        done = await asyncio.wrap_future(self.model.submit((first, second), manner))
        seconds = {"upload": uploaded, "decode": decoded, "wait": done.waited, "match": done.took}

        def finish() -> bytes:
            matches = done.result.filter(top=own.max_matches, spread=options.max_matches)
            start = time.perf_counter()
            models = ("homography", "fundamental") if options.geometry == "both" else (options.geometry,)
            estimates = tuple(matches.estimate(model) for model in models if model is not None)
            if estimates:
                seconds["geometry"] = time.perf_counter() - start
            seconds["total"] = sum(seconds.values())
            thumbnails = thumbnail0, thumbnail1
            answer = Answer(
                matches, estimates, seconds, done.stages, done.together, thumbnails, options.previews
            )
            return answer.encode(kind)

        return Response(await self.in_thread(finish), media_type=kind, headers={"Cache-Control": "no-store"})

    async def _side(
        self, n: int, sent: Sent, options: MatchOptions, manner: Manner, picture: bool
    ) -> tuple[Prepared | ImageFeatures, Any]:
        """Image n as the model takes it, and as small as a picture needs it."""
        key = getattr(options, f"key{n}")
        if key is not None:
            kept = self.kept.get(key, f"key{n}")
            features = kept.features
            if f"mask{n}" in sent.files:
                features = await self.in_thread(self._masked, features, sent, n)
            return features, kept.thumbnail
        matcher = self.matcher.adjusted(polish=manner.polish)

        def prepare() -> tuple[Prepared, Any]:
            image = self._read(sent.files[f"image{n}"], f"image{n}")
            prepared = self._masked(matcher.prepare(image, options.size), sent, n)
            return prepared, thumbnail(image.rgb) if picture else None

        return await self.in_thread(prepare)

    def _masked(self, image: Any, sent: Sent, n: int) -> Any:
        """By the mask that was sent for it, if one was."""
        mask = sent.files.get(f"mask{n}")
        if mask is None:
            return image
        try:
            return image.masked(self._read(mask, f"mask{n}"))
        except UserError as error:
            raise Refused(422, str(error)) from error

    def _read(self, data: bytes, name: str) -> Image:
        return read_photo(data, name, self.settings.max_pixels)

    async def keep(self, sent: Sent) -> Response:
        options = sent.options(FeatureOptions)
        self.check_size(options.size)
        if "image" not in sent.files:
            raise Refused(422, "image is missing")
        # Kept so that it can be matched in any manner.
        matcher = self.matcher.adjusted(polish=True)

        def prepare() -> tuple[Prepared, Any]:
            image = self._read(sent.files.pop("image"), "image")
            return matcher.prepare(image, options.size), thumbnail(image.rgb)

        prepared, small = await self.in_thread(prepare)
        manner = Manner(self.matcher.threshold, self.matcher.rotate, self.matcher.rescale, polish=True)
        done = await asyncio.wrap_future(self.model.submit((prepared,), manner))
        key, size = self.kept.add(Kept(done.result, small))
        values = {
            "key": key,
            "size": list(prepared.size),
            "bytes": size,
            "expires_in": self.settings.features_seconds,
        }
        return JSONResponse(values, 201)

    def check_size(self, size: int | None) -> None:
        if size is not None and size > self.max_size:
            raise Refused(422, f"size: at most {self.max_size} is allowed, not {size}")

    def info(self) -> dict[str, Any]:
        own, limits = self.matcher, self.settings
        return {
            "version": __version__,
            "device": str(own.device),
            "precision": str(own.dtype).removeprefix("torch."),
            "precisions": own.precisions,
            "weights": {
                "sha256": own.info.sha256,
                "shipped": own.info.path == SHIPPED,
                "trained": own.info.trained,
            },
            "defaults": {
                "size": own.size,
                "threshold": own.info.config.theta_c if own.threshold is None else own.threshold,
                "rotate": own.rotate,
                "rescale": own.rescale,
                "polish": own.polish,
            },
            "limits": {
                "bytes": limits.max_bytes,
                "pixels": limits.max_pixels,
                "size": self.max_size,
                "seconds": limits.timeout,
                "places": limits.places,
                "batch": self.batch,
                "features_bytes": self.kept.limit,
                "features_seconds": limits.features_seconds,
            },
            "formats": list(FORMATS),
            "examples": examples(),
        }


def parts_of(url: str) -> SplitResult:
    """No parts where it is no URL at all."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


async def attended(
    request: Request, work: Coroutine[Any, Any, Result], seconds: float, limit: float
) -> Result:
    """What comes of the work, unless it takes too long or nobody waits for it any more."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(departure(request))
    try:
        await asyncio.wait({task, watch}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watch.done():
            raise Gone
        raise Refused(504, f"the request took longer than the {limit:g} seconds allowed")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refuse(refused: Refused) -> Response:
    return JSONResponse({"error": refused.sentence}, refused.status, refused.headers)


def create_app(matcher: PairMatcher, settings: ServeSettings) -> FastAPI:
    PIL.Image.init()  # here, since threads that do it at the same time get in each other's way
    # How many pixels are too many is for the settings to say.
    warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it tells of what clients send
    service = Service(matcher, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="prism-match",
        version=__version__,
        description=schema.DESCRIPTION,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return refuse(error)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentences = {404: "there is nothing at this address; /docs tells what there is"}
        sentences[405] = "this address does not take this method; /docs tells which it takes"
        sentence = sentences.get(error.status_code, str(error.detail))
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    add_pages(app)

    @app.post("/v1/match", **schema.MATCH)
    async def match(request: Request) -> Response:
        """Where two images show the same points."""
        accept = ", ".join(request.headers.getlist("accept"))
        files = ("image0", "image1", "mask0", "mask1")
        return await service.answer(
            request, "match", files, lambda sent, uploaded: service.match(sent, uploaded, accept)
        )

    @app.post("/v1/features", **schema.FEATURES)
    async def features(request: Request) -> Response:
        """Keep what the model sees in an image, for a while, to match it with many."""
        return await service.answer(request, "features", ("image",), lambda sent, _: service.keep(sent))

    @app.delete("/v1/features/{key}", **schema.FORGET)
    async def forget(key: str, request: Request) -> Response:
        """Drop kept features."""
        service.authorize(request)
        if not service.kept.drop(key):
            raise Refused(404, "key: no features are kept under this key, or no longer")
        return Response(status_code=204)

    @app.get("/v1/info", **schema.INFO)
    async def info(request: Request) -> Response:
        """The version, the device, the weights, the defaults and the limits."""
        service.authorize(request)
        return JSONResponse(service.info())

    @app.get("/healthz", **schema.HEALTH)
    async def healthz() -> Response:
        """Whether the server answers at all."""
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", **schema.READY)
    async def readyz() -> Response:
        """Whether the model is loaded, warm and taking requests."""
        if service.stopping or not service.model.ready:
            raise Refused(503, "the model is not ready", Retry_After="1")
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", **schema.METRICS)
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        service.authorize(request)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app
