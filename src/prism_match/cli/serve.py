"""`prism serve`, and `prism app`, which is the same for one person."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from prism_match.cli.options import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    PolishOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SizeOption,
    ThresholdOption,
    WeightsOption,
    make_matcher,
)


def serve(
    host: Annotated[str, typer.Option(help="Where to listen; others than this machine need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    token: Annotated[
        Optional[str],
        typer.Option(envvar="PRISM_TOKEN", help="That clients have to send as a bearer token."),
    ] = None,
    places: Annotated[int, typer.Option(help="Requests at a time, waiting ones included.")] = 32,
    batch: Annotated[
        Optional[int],
        typer.Option(help="Waiting requests matched at once, at most [8 on a GPU, 1 on a CPU]."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.")] = 120.0,
    max_mib: Annotated[float, typer.Option(help="MiB of a request.")] = 32.0,
    max_megapixels: Annotated[float, typer.Option(help="Megapixels of an image.")] = 50.0,
    max_size: Annotated[int, typer.Option(help="Largest size that a request may ask for.")] = 1600,
    features_mib: Annotated[float, typer.Option(help="MiB of features kept on request.")] = 1024.0,
    features_seconds: Annotated[float, typer.Option(help="Seconds that they are kept for.")] = 600.0,
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    rotate: RotateOption = "auto",
    rescale: RescaleOption = "auto",
    polish: PolishOption = True,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "torch",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
) -> None:
    """Match photos for others, over HTTP.

    The address / is a page to do it in a browser, /docs lists what can be asked for. It ends by Ctrl+C or
    SIGTERM, once what has begun is done.

    \b
    Examples:
      prism serve
      curl -F image0=@a.jpg -F image1=@b.jpg http://127.0.0.1:8000/v1/match
      PRISM_TOKEN=secret prism serve --host 0.0.0.0 --port 80 --device cuda
    """
    from prism_match.serve import ServeSettings, check_installed, serve

    # Before the model is loaded: what is wrong should not take seconds to be told.
    check_installed()
    settings = ServeSettings(
        host, port, token or None, places, batch, timeout, max_mib, max_megapixels, max_size,
        features_mib, features_seconds,
    )  # fmt: skip
    matcher = make_matcher(
        weights, model_config, device, precision, size, threshold, rotate, polish, backend, rescale=rescale
    )
    serve(matcher, settings)


def page(
    port: Annotated[Optional[int], typer.Option(help="[8000, or any that is free]")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it.")] = True,
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    rotate: RotateOption = "auto",
    rescale: RescaleOption = "auto",
    polish: PolishOption = True,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "torch",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
) -> None:
    """Match photos in the browser. Nothing leaves this machine.

    It ends by Ctrl+C.

    \b
    Examples:
      prism app
      prism app --size 1152 --no-browser
    """
    from prism_match.serve import ServeSettings, check_installed, serve

    check_installed()
    settings = ServeSettings() if port is None else ServeSettings(port=port)
    matcher = make_matcher(
        weights, model_config, device, precision, size, threshold, rotate, polish, backend, rescale=rescale
    )
    serve(matcher, settings, any_port=port is None, browser=browser)
