"""The matcher behind a URL: `prism serve` and `prism app`. FastAPI and uvicorn come with the extra `serve`;
nothing but those commands imports them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from prism_match.errors import UserError
from prism_match.serve.settings import ServeSettings

if TYPE_CHECKING:
    from prism_match.engine import Matcher

__all__ = ["ServeSettings", "check_installed", "serve"]


def check_installed() -> None:
    for module in ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "orjson"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f'prism serve needs {module}: pip install "prism-match[serve]"') from error


def serve(
    matcher: Matcher, settings: ServeSettings, *, any_port: bool = False, browser: bool = False
) -> None:
    """Answers until it gets SIGTERM or SIGINT; then finishes what it has begun and returns.
    any_port: listens on a free port where the one of the settings is taken. browser: shows the page in it."""
    check_installed()
    from prism_match.serve.run import run

    run(matcher, settings, any_port, browser)
