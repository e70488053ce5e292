"""Sessions of browsers: a signed cookie in place of an access key, which pages cannot send with images and events.

A cookie names the key that the browser signed in with, and ends with it. The service stores no sessions: whoever knows
the secret in the store can check a cookie, so every process that serves HTTP accepts it, also after a restart. A cookie
counts only for requests of the service's own pages, because browsers send it along with requests of other pages too.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import HTTPConnection
from starlette.types import Scope

from ...errors import ProtoDCSError
from ..settings import ServeConfig
from .headers import header_values
from .keys import Caller, Keys
from .local import is_own_page
from .problems import ProblemError

_VERSION = "1"
# Longer cookies are none of ours.
_MAX_TOKEN = 200
# Sign-outs that a process remembers. Each is forgotten when its session would have ended.
_MAX_SIGNED_OUT = 10_000

_OTHER_PAGE = (
    "A session cookie counts only for requests of the service's own pages: send `Sec-Fetch-Site: same-origin` or the "
    "service's `Origin`, or use an access key."
)


class Session(NamedTuple):
    """A browser that signed in.

    Attributes:
        key: the id of its access key.
        expires: when it ends, in seconds since 1970.
        nonce: random; the same after a renewal.
    """

    key: str
    expires: int
    nonce: str


class Sessions:
    """Makes and checks session cookies. All processes of the service share the secret."""

    def __init__(self, keys: Keys, config: ServeConfig, secret: Callable[[], Awaitable[bytes]]):
        self._keys = keys
        self._seconds = config.session_seconds
        self._get_secret = secret
        self._secret: bytes | None = None
        # Cookies of services on other ports of the same host must not replace this one.
        self._name = f"protodcs_session_{config.port}"
        self._signed_out: dict[str, int] = {}

    def has_cookie(self, scope: Scope) -> bool:
        """Return whether a request has a session cookie."""
        return bool(self._token(scope))

    async def of_request(self, scope: Scope) -> tuple[Session, Caller] | None:
        """Return the session of a request and who signed in; None if it has none that is good.

        Raises:
            ProblemError: the request may come from a page of another site.
        """
        session = await self._session(self._token(scope))
        caller = None if session is None else self._keys.holder(session.key)
        if session is None or caller is None:
            return None
        if not _is_of_own_page(scope):
            raise ProblemError("forbidden", _OTHER_PAGE)
        return session, caller

    async def cookie(self, scope: Scope, key: str, renewed: Session | None = None) -> tuple[Session, str]:
        """Return a new session, or a renewed one, and the value of the header Set-Cookie."""
        nonce = secrets.token_urlsafe(12) if renewed is None else renewed.nonce
        session = Session(key, int(time.time() + self._seconds), nonce)
        text = f"{_VERSION}.{session.key}.{session.expires}.{session.nonce}"
        token = f"{text}.{_signature(await self._shared_secret(), text)}"
        return session, self._header(scope, token, int(self._seconds))

    def sign_out(self, scope: Scope, session: Session | None) -> str:
        """End a session, and return the header Set-Cookie that removes its cookie."""
        if session is not None:
            now = time.time()
            self._signed_out = {nonce: ends for nonce, ends in self._signed_out.items() if ends > now}
            if len(self._signed_out) >= _MAX_SIGNED_OUT:
                self._signed_out.pop(next(iter(self._signed_out)))
            # A renewed cookie of the same session ends later than this one.
            self._signed_out[session.nonce] = int(now + self._seconds)
        return self._header(scope, "", 0)

    def is_good(self, session: Session | None, caller: Caller) -> bool:
        """Return whether someone may go on with a long request: the key is good, and the session has not ended."""
        if session is not None and session.nonce in self._signed_out:
            return False
        return self._keys.holder(caller.key) == caller

    async def _session(self, token: str) -> Session | None:
        text, _, signature = token.rpartition(".")
        expected = _signature(await self._shared_secret(), text)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            return None
        _, key, expires, nonce = text.split(".")
        session = Session(key, int(expires), nonce)
        return None if session.expires <= time.time() or nonce in self._signed_out else session

    async def _shared_secret(self) -> bytes:
        if self._secret is None:
            try:
                self._secret = await self._get_secret()
            except ProtoDCSError:
                raise ProblemError("unavailable", "Sessions cannot be checked: the store does not respond.") from None
        return self._secret

    def _token(self, scope: Scope) -> str:
        """Return the cookie of a request; empty if there is none."""
        token = HTTPConnection(scope).cookies.get(self._name, "")
        return token if len(token) <= _MAX_TOKEN else ""

    def _header(self, scope: Scope, token: str, seconds: int) -> str:
        secure = "; Secure" if _is_https(scope) else ""
        return f"{self._name}={token}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def _signature(secret: bytes, text: str) -> str:
    digest = hmac.digest(secret, b"protodcs session " + text.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _is_https(scope: Scope) -> bool:
    """Return whether the browser speaks HTTPS, to the service or to the gateway before it.

    A header of the caller decides this for the caller's own cookie only.
    """
    return scope.get("scheme") == "https" or b"https" in map(bytes.lower, header_values(scope, b"x-forwarded-proto"))


def _is_of_own_page(scope: Scope) -> bool:
    """Return whether a page of this service made a request. A page of another site can change neither header."""
    if header_values(scope, b"origin"):
        return is_own_page(scope, ("http", "https"))
    return header_values(scope, b"sec-fetch-site") == [b"same-origin"]
