"""What a browser shows: the page, what it is made of, and photos to try it with. All of it comes with the
package and is the same for everyone, so that nobody needs a token for it; what the page asks the API for is
another matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException

STATIC = Path(__file__).parent / "static"
ASSETS = Path(__file__).parents[1] / "assets"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing from elsewhere, and no script but those in `static`; blob: and data: are the photos that are shown.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # which loads nothing at all
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the next version of the package has other files of the same names
}


def examples() -> list[dict[str, Any]]:
    """Every pair NAME0.jpg, NAME1.jpg among the assets."""
    names = sorted(path.stem[:-1] for path in ASSETS.glob("*0.jpg"))
    pairs = {name: [f"{name}{n}.jpg" for n in (0, 1)] for name in names}
    return [
        {"name": name, "images": [f"/examples/{file}" for file in files]}
        for name, files in pairs.items()
        if all((ASSETS / file).is_file() for file in files)
    ]


def add_pages(app: FastAPI) -> None:
    # By name from a list: a client names nothing that is then opened.
    static = {path.name: path for path in STATIC.iterdir() if path.suffix in KINDS}
    photos = {Path(url).name: ASSETS / Path(url).name for pair in examples() for url in pair["images"]}

    def show(path: Path, **headers: str) -> Response:
        kind = KINDS.get(path.suffix, "image/jpeg")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Response(path.read_bytes(), media_type=kind, headers=HEADERS | named)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return show(static["index.html"])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return show(static["docs.html"], Content_Security_Policy=DOCS_POLICY)

    @app.get("/static/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in static:
            raise HTTPException(404)
        return show(static[name])

    @app.get("/examples/{name}", include_in_schema=False)
    async def example(name: str) -> Response:
        if name not in photos:
            raise HTTPException(404)
        return show(photos[name])
