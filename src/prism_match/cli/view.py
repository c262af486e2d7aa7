"""`prism view`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer


def view(
    out: Annotated[
        Path, typer.Argument(help="What `prism sfm` wrote, or a COLMAP model.", show_default=False)
    ],
    images: Annotated[
        Optional[Path], typer.Option(help="Its photos [`images` by it, or told by prism sfm].")
    ] = None,
    poses: Annotated[
        Optional[Path], typer.Option(help="The poses.txt of `prism localize`, to show the queries, too.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine see all of it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Or the next one that is free.")] = 8080,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
) -> None:
    """Show a map in the browser: points, cameras with their photos, and who sees which point.

    Drag to turn, scroll to come nearer, click on a point to see its photos. It ends by Ctrl+C.

    \b
    Examples:
      prism view out
      prism view sparse/0 --images photos --no-browser --port 8081
      prism view map --poses localized/poses.txt
    """
    import webbrowser

    from prism_match.maps.viewer import Viewer, open_shown

    shown = open_shown(out, images, poses)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(f"prism: whoever reaches {host} sees the map and its photos", file=sys.stderr)
    with Viewer(shown, host, port) as viewer:
        print(f"{viewer.url}   Ctrl+C ends it", flush=True)
        if browser:
            webbrowser.open(viewer.url)
        try:
            viewer.wait()
        except KeyboardInterrupt:
            print()
