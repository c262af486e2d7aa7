"""The process around the API: a socket, uvicorn, and an end in peace."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import webbrowser
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from prism_match.errors import UserError
from prism_match.matcher import PairMatcher
from prism_match.serve.app import create_app
from prism_match.serve.settings import ServeSettings, listen

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Ends with 0 when it is told to end: uvicorn's own raises the signal again when all is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second time nothing is waited for
        self.should_exit = True


def make_server(app: FastAPI, settings: ServeSettings) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,  # addresses have keys in them
            server_header=False,
            # What is held open without being a request, such as headers that come byte by byte.
            limit_concurrency=max(256, 8 * settings.places),
            timeout_keep_alive=5,
            # Every request ends by its own limit.
            timeout_graceful_shutdown=round(settings.timeout) + 10,
        )
    )


def run(matcher: PairMatcher, settings: ServeSettings, any_port: bool = False, browser: bool = False) -> None:
    try:
        listener = listen(settings.host, settings.port)
    except UserError:
        if not any_port:
            raise
        listener = listen(settings.host, 0)
    server = make_server(create_app(matcher, settings), settings)
    precision = str(matcher.dtype).removeprefix("torch.")
    address = url(settings.host, listener)
    print(
        f"listening on {address} ({matcher.device}, {precision}, {matcher.size} px); Ctrl+C ends it",
        flush=True,
    )
    if browser:  # which may take its time, and waits for the server where it is quicker
        threading.Thread(target=show, args=(address,), daemon=True).start()
    server.run(sockets=[listener])


def show(address: str) -> None:
    try:
        shown = webbrowser.open(address)
    except webbrowser.Error:
        shown = False
    if not shown:
        print(f"no browser could be opened: open {address} in one", flush=True)


def url(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
