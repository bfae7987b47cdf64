"""Certificate: what a server shows that speaks TLS itself."""

from __future__ import annotations

import ssl
from pathlib import Path

from pagemill.errors import ConfigError


class Certificate:
    """A certificate and its key in files, for TLS 1.2 and later. Connections take `context`."""

    def __init__(self, certfile: Path, keyfile: Path | None) -> None:
        """keyfile: None where the key stands in `certfile`. Raises ConfigError."""
        self._certfile = certfile
        self._keyfile = keyfile
        self.context = self._read()
        self.context.set_alpn_protocols(["http/1.1"])

    def reload(self) -> None:
        """Reads the files again, for connections to come. Raises ConfigError, and changes nothing."""
        self._read()
        self._load(self.context)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:  # without a password, an encrypted key would have one asked for in the terminal
            context.load_cert_chain(self._certfile, self._keyfile, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificate {str(self._certfile)!r} with the key {str(self._keyfile or self._certfile)!r} cannot "
                f"be used: {error}; both must be PEM files, the key without a password",
                param="ssl_certfile",
            ) from error
