"""By which names a server may be called.

A server that only this machine reaches is still reached by any page in a browser on it whose own
name is made to lead here (DNS rebinding): to the browser that page and the server are one site. Such
a call has the page's name in its `Host` header, which no page can choose.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_runtime.server.errors import ApiError

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_SHOWN_LEN = 100


def allowed_hosts(
    sock: socket.socket, host: str, further: Collection[str] = ()
) -> frozenset[str] | None:
    """The names by which a server at a bound socket may be called; None: any.

    Any where other machines reach it, which know it by names that nobody here does, unless further
    names are given; else its own: loopback's, and `host`, for which the socket was bound.
    """
    if not further and not is_loopback(sock):
        return None
    return host_names((*_LOOPBACK_NAMES, sock.getsockname()[0], host, *further))


def host_names(names: Iterable[str]) -> frozenset[str]:
    """Names and addresses as `HostCheck` compares them."""
    return frozenset(name.lower().strip("[]") for name in names)


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine reaches what listens at a bound socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


class HostCheck:
    """ASGI middleware that refuses calls by other names with 400."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if _name(host) not in self._hosts:
                refusal = JSONResponse(_refused(host).to_dict(), 400)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """The header's name or address, without the port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _refused(host: str) -> ApiError:
    message = f"expected a name of this server as the host, got `{host[:_SHOWN_LEN] or 'none'}`"
    return ApiError(400, message, code="invalid_host")
