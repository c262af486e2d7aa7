"""The matcher behind a URL: `prism serve`. FastAPI and uvicorn come with the extra `serve`; nothing but that
command imports them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from prism_match.errors import UserError
from prism_match.serve.settings import ServeSettings

if TYPE_CHECKING:
    from prism_match.engine import Matcher

__all__ = ["ServeSettings", "check_installed", "serve"]


def check_installed() -> None:
    for module in ("fastapi", "uvicorn", "python_multipart", "prometheus_client"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f'prism serve needs {module}: pip install "prism-match[serve]"') from error


def serve(matcher: Matcher, settings: ServeSettings) -> None:
    """Answers until it gets SIGTERM or SIGINT; then finishes what it has begun and returns."""
    check_installed()
    from prism_match.serve.run import run

    run(matcher, settings)
