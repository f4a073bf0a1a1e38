"""Whom a request says that it comes from, and to which name: what is believed, and what is refused.

A page of any site can have its reader's browser ask a server on the reader's own machine. It may
even read the answers: where it has its own name resolve to 127.0.0.1 ("DNS rebinding"), the browser
takes both for one site. So the name is looked at (`Host`), and the site (`Origin`, `Sec-Fetch-Site`
of https://www.w3.org/TR/fetch-metadata/). A program that is no browser need send neither `Origin`
nor `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from hypocenter.server.api_error import ApiError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@?#\\\s]*)(?::([0-9]{0,5}))?", re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MAX_SHOWN = 100


class Strangers:
    """`is_local`: only this machine can reach the server, so only its own names are believed.

    `hosts` are other names that it may be called by. Where it is not local, every name is believed
    unless `hosts` are given. `origins` are the sites whose pages may ask; "*" is every one.
    """

    def __init__(
        self, *, is_local: bool, hosts: Sequence[str] = (), origins: Sequence[str] = ()
    ) -> None:
        self._checks_host = is_local or bool(hosts)
        self._hosts = frozenset(_name_of(host) for host in hosts)
        self._origins = frozenset(origins)

    def refusal(self, host: str, origin: str, fetch_site: str, *, is_open: bool) -> ApiError | None:
        """Why a request with these headers is not answered; "" is a header that it has not got.

        A route that `is_open` answers to any name: whoever checks its health may not know one.
        """
        if not is_open and not self._is_known(host):
            shown = host[:_MAX_SHOWN]
            return ApiError(
                403,
                f"this server does not go by the name {shown!r}; if that is one of its names, "
                "start it with --allowed-host and the name",
                code="host_not_allowed",
            )
        if "*" in self._origins or origin in self._origins or _is_same(origin, host):
            return None
        if origin:
            shown = origin[:_MAX_SHOWN]
            return ApiError(
                403,
                f"pages of {shown!r} may not ask here; start the server with --cors-origin and "
                "that site",
                code="origin_not_allowed",
            )
        if fetch_site.strip().lower() == "cross-site":
            return ApiError(403, "pages of another site may not ask here", code="cross_site")
        return None

    def _is_known(self, host: str) -> bool:
        """Whether a Host is believed. HTTP/1.0 has none, and no browser leaves it out."""
        if not self._checks_host or not host:
            return True
        name = _name_of(host)
        return name in self._hosts or is_loopback(name)


def is_host(name: str) -> bool:
    """Whether it can stand in a Host: a name or an address, with a port or without."""
    return bool(name) and _HOST.fullmatch(name.lower()) is not None


def is_loopback(name: str) -> bool:
    """Whether a name or an address, in lower case, can only be this machine."""
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _name_of(host: str) -> str:
    """The name or address in a Host: no port, no brackets, no dot at the end, in lower case.

    "" for what is no Host.
    """
    found = _HOST.fullmatch(host.strip().lower())
    return "" if found is None else found[1].strip("[]").removesuffix(".")


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of `origin` asks the very server that it came from."""
    scheme, mark, authority = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if not mark or port is None or not host:
        return False
    return authority.removesuffix(f":{port}") == host.lower().removesuffix(f":{port}")
