"""Where the server listens, and what it allows."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from prism_match.errors import UserError

MIB = 2**20


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    token: str | None = None  # that clients have to send; needed where others than this machine can connect
    places: int = 32  # requests at a time, from the first byte that comes to the last that goes
    batch: int | None = None  # pairs matched at once, at most; None: 8 on a GPU, 1 on a CPU
    timeout: float = 120.0  # seconds for all of a request
    max_mib: float = 32.0  # of a request
    max_megapixels: float = 50.0  # of an image
    max_size: int = 1600  # that a client may ask for, in pixels
    features_mib: float = 1024.0  # of features kept for one-to-many matching
    features_seconds: float = 600.0  # that they are kept for
    decoders: int = min(4, os.cpu_count() or 1)  # threads that decode photos and encode answers

    def __post_init__(self) -> None:
        for name in ("timeout", "max_mib", "max_megapixels", "features_mib", "features_seconds"):
            if math.isinf(getattr(self, name)):  # /v1/info tells the limits, in JSON
                raise UserError(f"{name.replace('_', '-')} must be finite")
        for name in ("places", "timeout", "max_mib", "max_megapixels", "max_size", "decoders"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        if self.batch is not None and self.batch < 1:
            raise UserError(f"batch must be at least 1, not {self.batch}")
        for name in ("features_mib", "features_seconds"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name.replace('_', '-')} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.port < 2**16:
            raise UserError(f"port must be from 0 to 65535, not {self.port}")
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise UserError("the token must be of printable ASCII characters, without spaces")
        if not self.token and not is_local(self.host):
            raise UserError(
                f"{self.host}: others can connect there, so give a token: --token, or PRISM_TOKEN in the "
                "environment"
            )

    @property
    def max_bytes(self) -> int:
        return int(self.max_mib * MIB)

    @property
    def max_pixels(self) -> int:
        return int(self.max_megapixels * 1e6)


def is_local(host: str) -> bool:
    """Whether only this machine can connect to it."""
    return all(ip_address(address[4][0].split("%")[0]).is_loopback for address in addresses(host, 0))


def addresses(host: str, port: int) -> list:
    try:
        return socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{host}: no such host") from error


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to."""
    family, kind, protocol, _, address = addresses(host, port)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(f"{host}:{port}: cannot listen there ({error.strerror})") from error
    return listener
