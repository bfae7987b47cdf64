"""ServerAccess: who may ask a server, and from where."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pagemill.arguments import about, check_fields, suggest_arguments
from pagemill.errors import ConfigError, shown
from pagemill.server.access.tls import Certificate
from pagemill.tenant_limits import TenantsFile, key_digests

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_HOST = re.compile(r"(\*|(\*\.)?[^\s*,:/?#@\[\]]+)?")
"""Matches names that `AllowedHosts` can find in a request; addresses are the others."""

KEY_VARIABLES = {"api_key": "PAGEMILL_API_KEY", "admin_api_key": "PAGEMILL_ADMIN_API_KEY"}
"""The environment variable that has the key where no flag gives one: a command line can be read by everybody on the
machine."""


@suggest_arguments
@dataclass(kw_only=True, frozen=True)
class ServerAccess:
    """Says who may ask one HTTP server. Raises `ConfigError` for a wrong value.

    Keys are given as they are, or as `sha256:` and the SHA-256 of their bytes.
    """

    api_key: Annotated[
        list[str],
        about(
            "A key; every request but for the page at /, /health, /live, /ready and /version must send one. Several "
            "may be given. Default: the environment variable PAGEMILL_API_KEY."
        ),
    ] = field(default_factory=list)
    admin_api_key: Annotated[
        list[str],
        about(
            "A key that may also change the KV pool's size and tenants, and read /metrics. May be given several times. "
            "Default: the environment variable PAGEMILL_ADMIN_API_KEY."
        ),
    ] = field(default_factory=list)
    allow_unauthenticated: Annotated[
        bool, about("Serve everybody who can reach the server where it has no keys and is not on loopback.")
    ] = False

    allowed_hosts: Annotated[
        list[str],
        about(
            "A name under which the server may be asked, beside addresses and localhost; *.example.com for all that "
            "end so, * for any. May be given several times. Default: any where there are keys or --host is not on "
            "loopback, else none."
        ),
    ] = field(default_factory=list)
    forwarded_allow_ips: Annotated[
        list[str],
        about(
            "A proxy's address or network, whose X-Forwarded-For and X-Forwarded-Proto are believed, * for any. May be "
            "given several times, or with commas between."
        ),
    ] = field(default_factory=list)
    allowed_origins: Annotated[
        list[str],
        about(
            "A site (https://example.com) whose pages may ask the server from a browser (CORS), * for all. May be "
            "given several times, or as a JSON list."
        ),
    ] = field(default_factory=list)
    allowed_methods: Annotated[
        list[str], about("A method that pages of allowed_origins may use, * for all; given as those are.")
    ] = field(default_factory=lambda: ["*"])
    allowed_headers: Annotated[
        list[str], about("A header that pages of allowed_origins may send, * for all; given as those are.")
    ] = field(default_factory=lambda: ["*"])
    allow_credentials: Annotated[
        bool, about("Let browsers send cookies and client certificates with requests of allowed_origins.")
    ] = False

    ssl_certfile: Annotated[
        str | None,
        about("PEM file of the certificate, with those between it and its root; the server then speaks HTTPS."),
    ] = None
    ssl_keyfile: Annotated[
        str | None, about("PEM file of the certificate's key, without a password. Default: it stands in ssl_certfile.")
    ] = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for name in KEY_VARIABLES:
            key_digests(name, getattr(self, name))
        self._check_hosts()
        self._check_origins()
        for proxy in ",".join(self.forwarded_allow_ips).replace("*", "").split(","):
            _check_network(proxy.strip())
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(
                "ssl_keyfile is given without the certificate that it is for; give ssl_certfile too",
                param="ssl_keyfile",
            )

    @classmethod
    def read(cls, given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerAccess:
        """Returns what was given, with keys from the environment where none were. Raises ConfigError."""
        variables = {name: environment.get(variable) for name, variable in KEY_VARIABLES.items()}
        found = {name: _entries(name, [value]) for name, value in variables.items() if value}
        lists = {name: _entries(name, value) for name, value in given.items() if isinstance(value, list)}
        return cls(**(found | dict(given) | lists))

    def certificate(self) -> Certificate | None:
        """Reads the certificate, if there is to be one. Raises ConfigError."""
        if self.ssl_certfile is None:
            return None
        keyfile = None if self.ssl_keyfile is None else Path(os.path.expanduser(self.ssl_keyfile))
        return Certificate(Path(os.path.expanduser(self.ssl_certfile)), keyfile)

    def has_keys(self, tenants: TenantsFile | None) -> bool:
        """Returns whether requests need a key, given here or in a tenants file."""
        return bool(self.api_key or (tenants is not None and tenants.keys))

    def check_address(self, address: str, tenants: TenantsFile | None) -> None:
        """Raises ConfigError for an address that others can reach, if there are no keys and nobody allowed that."""
        if is_loopback(address) or self.allow_unauthenticated or self.has_keys(tenants):
            return
        raise ConfigError(
            f"the address {address} can be reached from elsewhere, and there is no API key; give one (--api-key, "
            f"PAGEMILL_API_KEY, or --tenants), listen on 127.0.0.1, or serve everybody with --allow-unauthenticated",
            param="host",
        )

    def _check_hosts(self) -> None:
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host) and not is_address(host):
                raise ConfigError(
                    f"allowed_hosts has {shown(host)}, which matches no request; give a name or an address alone, "
                    f"without scheme, port and path, such as llm.example.com, *.example.com or *",
                    param="allowed_hosts",
                )

    def _check_origins(self) -> None:
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {shown(origin)}; an origin is a scheme, a name and a port if it has one, "
                    f"such as https://example.com:8443, without a path",
                    param="allowed_origins",
                )
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError(
                "allow_credentials is True and allowed_origins is *, so every site could act as its visitor; name the "
                "sites",
                param="allow_credentials",
            )
        if not self.allowed_origins:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name) not in (["*"], False):
                    raise ConfigError(
                        f"{name} is {shown(getattr(self, name))} without allowed_origins, for which it would hold; "
                        f"give those too",
                        param=name,
                    )


def _entries(name: str, given: list[str]) -> list[str]:
    """Returns what a flag was given: each time one value, or a JSON list of them."""
    return [entry for value in given for entry in (_listed(name, value) if value.startswith("[") else [value])]


def _check_network(proxy: str) -> None:
    try:
        if proxy:
            ipaddress.ip_network(proxy)
    except ValueError as error:
        raise ConfigError(
            f"forwarded_allow_ips has {shown(proxy)}, which is neither an address, a network nor *: {error}",
            param="forwarded_allow_ips",
        ) from None


def _listed(name: str, value: str) -> list[str]:
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.DecodeError as error:
        what = "an entry" if name in KEY_VARIABLES else shown(value)  # keys stand in no message
        raise ConfigError(f"{name} has {what}, which is no JSON list of texts: {error}", param=name) from None


def is_loopback(address: str) -> bool:
    """Returns True for an IP address that only this machine can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_address(host: str) -> bool:
    """Returns True for an IP address, as it stands in a URL without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
