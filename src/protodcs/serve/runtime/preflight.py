"""Checks before a service starts, so that a mistake in the settings is one line within seconds.

They don't import an encoder's libraries, and change nothing. The service checks the same again while it
starts, because all of it can change in between.
"""

import socket
import ssl

from ...errors import ConfigError
from ..access.keys import Keys
from ..settings import ServeConfig


def check(config: ServeConfig, *, ports: bool = True) -> None:
    """Raise an error that names the first problem with the files, ports or encoder of a service.

    Args:
        config: the settings of the service.
        ports: whether the service will listen on this machine.

    Raises:
        ConfigError: a file or a port cannot be used.
        EncoderError: the encoder is unknown, or its files or packages are missing.
    """
    if config.keys is not None:
        Keys.open(config.keys)
    _check_certificate(config)
    if ports:
        bind(config.host, config.port, "port").close()
        if config.metrics_port:
            bind(config.host, config.metrics_port, "metrics_port").close()
    if config.encoder is not None:
        # A service without an encoder needs no Pillow.
        from ... import encoders

        encoders.check(config.encoder)


def bind(host: str, port: int, setting: str) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet. Raise ConfigError if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        # Another process that listens there is an error all the same.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError as problem:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {problem.strerror or problem}. Choose another `{setting}`, or stop the "
            "program that uses it."
        ) from None


def _check_certificate(config: ServeConfig) -> None:
    if config.tls_certificate is None or config.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{config.tls_certificate} and {config.tls_key} are not a certificate and its key in PEM format: {problem}"
        ) from None
