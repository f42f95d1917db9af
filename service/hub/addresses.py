"""Which hosts a pull may reach: the endpoint, public hosts, and private ones only if the endpoint is private."""

from __future__ import annotations

import ipaddress
import socket
from typing import TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ..errors import PeerError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
# Well-known prefix of NAT64: the last 32 bits are an IPv4 address.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def kind_of(address: Address) -> str:
    """The kind of an address: public, loopback, private (a local network), or never.

    "never" is what no hub has: link-local, multicast, unspecified, reserved.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return kind_of(inner)
    if address.is_loopback:
        return "loopback"
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return "never"
    if address.is_global:
        return "public"
    return "private" if address.is_private or address in ipaddress.ip_network("100.64.0.0/10") else "never"


def literal(host: str) -> Address | None:
    """The address in a URL's host, None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


class Reach:
    """The hosts that may be connected to. Endpoints are trusted; another host's address must be public or of the
    same kind as an endpoint's.
    """

    def __init__(self, endpoints: list[URL], proxies: list[str]) -> None:
        self._own = {(url.host or "").lower() for url in endpoints}
        self._proxies = {host.lower() for host in proxies}
        self._plain = {(url.host or "").lower() for url in endpoints if url.scheme == "http"}
        self._kinds = {"public"}
        for url in endpoints:
            address = literal(url.host or "")
            if address is not None:
                self._kinds.add(kind_of(address))

    def check_url(self, url: URL, came_from: URL | None) -> None:
        """Raise PeerError for an address that a redirect must not lead to: plain HTTP, or a private one."""
        host = (url.host or "").lower()
        source = f"{came_from.host} redirects to {host}" if came_from else host
        if url.scheme not in ("https", "http") or not host:
            raise PeerError(f"{source} by the scheme {url.scheme!r}; only https is followed")
        if url.user or url.password:
            raise PeerError(f"{source} with a password in the address; that is not followed")
        address = literal(host)
        local = address is not None and kind_of(address) == "loopback" and "loopback" in self._kinds
        if url.scheme == "http" and host not in self._plain and not local:
            raise PeerError(
                f"{source} without encryption (http); only https is followed, or a mirror that is named with http"
            )
        if address is not None and host not in self._own:
            self._check(address, source)

    def check_resolved(self, host: str, addresses: list[str]) -> None:
        """Remember the kinds of an endpoint's addresses. Raise PeerError for another host's address of another kind."""
        found = [address for text in addresses if (address := literal(text)) is not None]
        if host.lower() in self._own:
            self._kinds.update(kind_of(address) for address in found)
        for address in found if host.lower() not in self._own | self._proxies else ():
            self._check(address, host)

    def _check(self, address: Address, source: str) -> None:
        kind = kind_of(address)
        if kind == "never" or kind not in self._kinds:
            raise PeerError(
                f"{source}, which is the {kind} address {address}; a public hub may not lead into your own network"
            )


class GuardedResolver(AbstractResolver):
    """Resolves names and refuses addresses that a Reach does not allow: the checked address is the one that is
    connected to.
    """

    def __init__(self, reach: Reach, inner: AbstractResolver) -> None:
        self._reach = reach
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        self._reach.check_resolved(host, [entry["host"] for entry in found])
        return found

    async def close(self) -> None:
        await self._inner.close()
