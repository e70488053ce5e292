"""Hostile requests as bytes on the wire, the same ones for the same seed.

Images, JSON, forms, compressed bodies, slow senders, broken HTTP, odd paths and headers, forged states, text that
cannot be encoded, the most expensive settings, and floods of imports. Each attack names the statuses that are right.
`attack_run` sends the attacks and compares.
"""

import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

import hostile_images
from protodcs import ProtoDCSConfig, StreamDCS, StreamDCSConfig
from protodcs.core import state

IMAGES, NUMBERS = "images", "numbers"
REFUSED = frozenset(range(400, 500))
_FOR_GATEWAY = frozenset(
    ["an odd request id", "a time limit of the proxy", "a session of the proxy", "a model of the proxy"]
)


@dataclass(frozen=True, slots=True)
class Attack:
    """One connection of an attacker.

    Attributes:
        family: kind of the attack, in one word.
        what: description of this attack.
        parts: bytes to send, and between them pauses in seconds.
        wanted: the statuses that are right; None: all below 500.
        broken: the bytes are not valid HTTP. A closed connection or no response is right, too.
        half: after the last byte, close the sending side and keep reading.
        leaves: close the connection without waiting for a response.
        for_gateway: Ray's proxy answers 500 if the header is not UTF-8 or no number. The gateway before it replaces or
            deletes the header.
    """

    family: str
    what: str
    parts: tuple[bytes | float, ...]
    wanted: frozenset[int] | None = None
    broken: bool = False
    half: bool = False
    leaves: bool = False
    for_gateway: bool = False

    @property
    def slow(self) -> bool:
        """Whether it pauses while it sends."""
        return any(isinstance(part, float) for part in self.parts)


class Hostile:
    """Makes attacks on a service that has the streams IMAGES, of an encoder, and NUMBERS, of features.

    Args:
        seed: seed of all random choices.
        folder: the test data, for real images that are then damaged.
        rows, features: prototypes and features of NUMBERS.
        body_seconds: how long the service waits for a body.
        headers: further headers of each request, such as a key.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        rows: np.ndarray,
        features: np.ndarray,
        body_seconds: float,
        headers: tuple[bytes, ...] = (),
    ):
        self._rng = random.Random(seed)
        self._images = hostile_images.real_images(folder)
        self._sound = [data for image in self._images for data in hostile_images.variants(image).values()]
        self._bombs = self._all_bombs()
        self._features = features
        self._prototypes = rows.tolist()
        self._too_slow = 1.5 * body_seconds
        self._headers = headers
        engine = StreamDCS(rows)
        engine.observe_many(features[:60])
        self._state = engine.snapshot()
        engine.observe_many(features[60:])
        self._large_state = engine.snapshot()

    def attacks(self, count: int) -> Iterator[Attack]:
        """Yield `count` attacks. Each family has its share."""
        families: list[tuple[Callable[[], Attack], int]] = [
            (self._image, 22),
            (self._json, 18),
            (self._form, 10),
            (self._packed, 6),
            (self._slow, 6),
            (self._chunks, 5),
            (self._broken, 8),
            (self._path, 8),
            (self._header, 8),
            (self._lying_state, 6),
            (self._spec, 6),
            (self._surrogate, 8),
            (self._expensive, 6),
            (self._import, 6),
        ]
        makers = [maker for maker, share in families for _ in range(share)]
        # Each family at least once.
        first = [maker for maker, _ in families]
        for number in range(count):
            yield (first[number] if number < len(first) else self._rng.choice(makers))()

    # What requests are made of.

    def _request(self, method: str, path: str, body: bytes = b"", kind: str | bytes = b"", *more: bytes) -> bytes:
        """A request that is well-formed, but for what it is given."""
        kind = kind.encode() if isinstance(kind, str) else kind
        headers = [b"content-length: %d" % len(body), *([b"content-type: " + kind] if kind else []), *more]
        return self._head(method, path, *headers) + body

    def _head(self, method: str, path: str, *headers: bytes) -> bytes:
        first = f"{method} {path} HTTP/1.1".encode("latin-1")
        return b"\r\n".join([first, b"host: service", b"connection: close", *self._headers, *headers, b"", b""])

    def _deciding(self, stream: str) -> str:
        return f"/v1/streams/{stream}/{self._rng.choice(['observe', 'observe', 'peek', 'explain'])}"

    def _feature(self) -> bytes:
        return self._rng.choice(self._features).astype("<f4").tobytes()

    # Images.

    def _all_bombs(self) -> Iterator[bytes]:
        while True:
            yield from hostile_images.bombs(self._images[0])

    def _image(self) -> Attack:
        what, data = self._spoilt()
        kind = self._rng.choice(["image/png", "image/jpeg", "image/gif", "image/x-nonsense", "IMAGE/*; q=1"])
        return Attack("image", what, (self._request("POST", self._deciding(IMAGES), data, kind),))

    def _spoilt(self) -> tuple[str, bytes]:
        """An image, and what was done to it."""
        rng = self._rng
        data = rng.choice(self._sound)
        what = rng.choice(["sound", "bomb", "size", "flips", "cut", "surgery", "polyglot", "giant", "noise", "foreign"])
        match what:
            case "bomb":
                data = next(self._bombs)
            case "size":
                sides = hostile_images.SIDES
                data = hostile_images.with_other_size(data, rng.choice(sides), rng.choice(sides))
            case "flips":
                data = hostile_images._flipped(data, rng, 20)
            case "cut":
                data = data[: rng.randrange(len(data))]
            case "surgery":
                data = hostile_images.shuffled_parts(data, rng)
            case "polyglot":
                other = rng.choice([b"PK\x03\x04", b"%PDF-1.7\n", b"<script>", b"\x7fELF", rng.choice(self._sound)])
                data = rng.choice([data + other, other + data, data[:40] + other + data[40:]])
            case "giant":
                # As many pixels as are let in, and more, in a few thousand bytes.
                side = rng.choice([1000, 4900, 5100, 8000])
                data = hostile_images.saved(Image.new("L", (side, side)), "PNG")
            case "noise":
                data = rng.randbytes(rng.choice([0, 1, 3, 30, 5000]))
            case "foreign":
                data = rng.choice(list(hostile_images.foreigners(self._images[0], rng)))
        return what, data

    # JSON.

    def _json(self) -> Attack:
        rng = self._rng
        what, body = rng.choice(list(self._json_bodies().items()))
        routes = [("POST", self._deciding(NUMBERS))] * 3 + [
            ("POST", "/v1/streams"),
            ("POST", f"/v1/streams/{NUMBERS}/snapshots"),
            ("POST", f"/v1/streams/{NUMBERS}/rollback"),
            ("POST", f"/v1/streams/{NUMBERS}/classes"),
            ("PUT", "/v1/workers"),
        ]
        method, path = rng.choice(routes)
        kind = rng.choice(["application/json"] * 4 + ["application/json; charset=utf-16", "application/problem+json"])
        return Attack("json", what, (self._request(method, path, body(), kind),))

    def _json_bodies(self) -> dict[str, Callable[[], bytes]]:
        rng = self._rng
        deep = rng.choice([50, 500, 5000, 200_000])
        good = self._features[0].astype(float).tolist()

        def said(value: Any) -> bytes:
            return json.dumps({"features": value, "name": value, "id": value, "inputs": value, "count": value}).encode()

        return {
            "deep lists": lambda: b'{"features": ' + b"[" * deep + b"]" * rng.choice([0, deep]) + b"}",
            "deep objects": lambda: b'{"a":' * deep + b"1" + b"}" * rng.choice([0, deep]),
            "huge numbers": lambda: (
                b'{"features": [[%s]]}' % rng.choice([b"1e999", b"9" * 5000, b"1e-999", b"-0", b"1E400"])
            ),
            "no numbers": lambda: (
                b'{"features": [[%s]]}' % b",".join([rng.choice([b"NaN", b"-Infinity", b"Infinity"])] * 32)
            ),
            "double keys": lambda: b'{"features": [[1]], "features": %s}' % rng.choice([b"7", b"[]", b'"x"', b"{}"]),
            "thousands of keys": lambda: json.dumps({f"k{n}": n for n in range(rng.choice([10, 20_000]))}).encode(),
            "wrong types": lambda: said(
                rng.choice([None, True, 7, "x", {}, [], [[]], [None], [["1"]], [[True]], [{}], [[{}]]])
            ),
            "ragged": lambda: said([good, good[:-1]]),
            "other width": lambda: said([good * 2]),
            "one bad of many": lambda: said([good] * 20 + [[0.0] * len(good)]),
            "too many rows": lambda: b'{"features": [' + b"[1]," * 5000 + b"[1]]}",
            "no utf-8": lambda: (
                b'{"name": "' + rng.choice([b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\x80"]) + b'"}'
            ),
            "lone surrogates": lambda: b'{"id": "\\ud800", "name": "\\udfff", "classes": ["\\ud83d"]}',
            "nulls in names": lambda: said("a\0b"),
            "white space": lambda: b" " * rng.choice([1000, 4_000_000]) + b"{}",
            "empty": lambda: b"",
            "cut": lambda: said([good])[: rng.randrange(1, 300)],
            "noise": lambda: rng.randbytes(rng.choice([1, 20, 2000])),
            "utf-16": lambda: said([good]).decode().encode("utf-16"),
            "byte order mark": lambda: b"\xef\xbb\xbf" + said([good]),
            "a long name": lambda: said("x" * rng.choice([201, 100_000, 2_000_000])),
            "much of nothing": lambda: b'{"features": [' + b"[]," * rng.choice([1000, 1_000_000]) + b"[]]}",
            "many numbers": lambda: b'{"features": [[' + b"0.5," * rng.choice([1000, 1_000_000]) + b"1]]}",
            "comments": lambda: b'{/* */"features": [[1]]} // x',
            "two documents": lambda: b'{"features": [[1]]}{"features": [[2]]}',
            "poison of prototypes": lambda: b'{"id": "p", "__proto__": {"x": 1}, "constructor": {}, "__class__": "x"}',
        }

    # Forms.

    def _form(self) -> Attack:
        rng = self._rng
        boundary = rng.choice([b"xx", b"-" * 70, b"a b", b"x" * 5000])
        sound = rng.choice(self._sound)
        part = b'content-disposition: form-data; name="images"; filename="a.png"'
        bodies: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "no boundary": lambda: (self._parts(boundary, [(part, sound)]), b"multipart/form-data"),
            "empty boundary": lambda: (self._parts(b"", [(part, sound)]), b"multipart/form-data; boundary="),
            "another boundary": lambda: (self._parts(b"yy", [(part, sound)]), self._form_type(boundary)),
            "a thousand parts": lambda: (self._parts(boundary, [(part, b"x")] * 1000), self._form_type(boundary)),
            "a thousand fields": lambda: (
                self._parts(boundary, [(b'content-disposition: form-data; name="a"', b"x")] * 1000),
                self._form_type(boundary),
            ),
            "nested": lambda: (
                self._parts(
                    boundary,
                    [
                        (
                            part + b"\r\ncontent-type: multipart/mixed; boundary=in",
                            self._parts(b"in", [(part, sound)] * 3),
                        )
                    ],
                ),
                self._form_type(boundary),
            ),
            "cut": lambda: (
                (whole := self._parts(boundary, [(part, sound)] * 3))[: rng.randrange(len(whole))],
                self._form_type(boundary),
            ),
            "huge part header": lambda: (
                self._parts(boundary, [(part + b"\r\nx: " + b"y" * rng.choice([10_000, 3_000_000]), sound)]),
                self._form_type(boundary),
            ),
            "many part headers": lambda: (
                self._parts(boundary, [(part + b"\r\nx: y" * rng.choice([100, 50_000]), sound)]),
                self._form_type(boundary),
            ),
            "no name": lambda: (
                self._parts(boundary, [(b"content-disposition: form-data", sound)]),
                self._form_type(boundary),
            ),
            "no header": lambda: (self._parts(boundary, [(b"", sound)]), self._form_type(boundary)),
            "odd file names": lambda: (
                self._parts(
                    boundary,
                    [
                        (b'content-disposition: form-data; name="i"; filename="%s"' % name, sound)
                        for name in (b"../../etc/passwd", b"\xff\xfe", b"a\x00b", b"x" * 9000)
                    ],
                ),
                self._form_type(boundary),
            ),
            "odd charset": lambda: (
                self._parts(boundary, [(part, sound)]),
                self._form_type(boundary) + b"; charset=" + rng.choice([b"rot13", b"hex", b"zip", b"x" * 999]),
            ),
            "spoilt images": lambda: (
                self._parts(boundary, [(part, self._spoilt()[1]) for _ in range(rng.randint(1, 5))]),
                self._form_type(boundary),
            ),
            "only the end": lambda: (b"--" + boundary + b"--\r\n", self._form_type(boundary)),
            "only line ends": lambda: (b"\r\n" * 100_000, self._form_type(boundary)),
            "half boundaries": lambda: ((b"\r\n--" + boundary[:-1]) * 2000, self._form_type(boundary)),
            "noise": lambda: (rng.randbytes(3000), self._form_type(boundary)),
        }
        what, make = rng.choice(list(bodies.items()))
        body, kind = make()
        return Attack("form", what, (self._request("POST", self._deciding(IMAGES), body, kind),))

    @staticmethod
    def _form_type(boundary: bytes) -> bytes:
        return b'multipart/form-data; boundary="%s"' % boundary

    @staticmethod
    def _parts(boundary: bytes, parts: list[tuple[bytes, bytes]]) -> bytes:
        pieces = [b"--%s\r\n%s\r\n\r\n%s\r\n" % (boundary, head, body) for head, body in parts]
        return b"".join(pieces) + b"--%s--\r\n" % boundary

    # Packed bodies: none of them is unpacked.

    def _packed(self) -> Attack:
        rng = self._rng
        plain = bytes(rng.choice([0, 100, 20_000_000]))
        name, data = rng.choice(
            [
                (b"gzip", gzip.compress(plain, 1)),
                (b"GZIP", gzip.compress(gzip.compress(plain, 1), 1)),
                (b"deflate", zlib.compress(plain, 1)),
                (b"x-gzip", b"\x1f\x8b" + rng.randbytes(100)),
                (b"br", b"\xce\xb2\xcf\x81" * 20),
                (b"zstd", b"\x28\xb5\x2f\xfd" + rng.randbytes(60)),
                (b"gzip, gzip, gzip", gzip.compress(plain, 1)),
                (b"identity, gzip", gzip.compress(plain, 1)),
                (b"nonsense", b"x"),
                (b"*", b"x"),
                (b"\xff", b"x"),
            ]
        )
        path, kind = rng.choice(
            [(self._deciding(IMAGES), "image/png"), ("/v1/streams", "application/json"), (self._deciding(NUMBERS), "")]
        )
        sent = self._request("POST", path, data, kind, b"content-encoding: " + name)
        return Attack("packed", repr(name), (sent,), frozenset([415]))

    # Slow and silent ones.

    def _slow(self) -> Attack:
        rng = self._rng
        path = rng.choice([self._deciding(NUMBERS), self._deciding(IMAGES), "/v1/streams"])
        kind = rng.choice(
            [b"image/png", b"application/json", b"application/octet-stream", b"multipart/form-data; boundary=x"]
        )
        head = self._head("POST", path, b"content-length: 1000", b"content-type: " + kind)
        late = frozenset([408])
        # A form or JSON may be refused for its kind before its body is missed.
        refused = late | {400, 415, 422}
        drip = tuple(part for _ in range(8) for part in (b"x", self._too_slow / 8))
        line = tuple(part for n in range(6) for part in (b"x-%d: y\r\n" % n, self._too_slow / 6))
        chunked = self._head("POST", path, b"transfer-encoding: chunked", b"content-type: " + kind)
        choices: dict[str, Attack] = {
            "headers that never end": Attack("slow", "", (head[:-2], *line), broken=True, leaves=True),
            "half a request line": Attack("slow", "", (b"GET /v1/he", self._too_slow), broken=True, leaves=True),
            "nothing at all": Attack("slow", "", (self._too_slow,), broken=True, leaves=True),
            "a body that drips": Attack("slow", "", (head, *drip), refused),
            "a body that stops": Attack("slow", "", (head + b"x" * 500,), refused),
            "a body that never comes": Attack("slow", "", (head,), refused),
            "a chunk that never ends": Attack("slow", "", (chunked + b"400\r\nx", 0.01), refused),
            "half closed before the body": Attack("slow", "", (head,), refused, broken=True, half=True),
            "half closed in the body": Attack("slow", "", (head + b"x" * 10,), refused, broken=True, half=True),
            "half closed after the body": Attack(
                "slow", "", (self._request("POST", self._deciding(NUMBERS), self._feature()),), broken=True, half=True
            ),
            "gone in the body": Attack("slow", "", (head + b"x" * 10,), broken=True, leaves=True),
            "gone before the answer": Attack(
                "slow", "", (self._request("POST", self._deciding(NUMBERS), self._feature()),), broken=True, leaves=True
            ),
            "continue and then nothing": Attack(
                "slow", "", (head[:-2] + b"expect: 100-continue\r\n\r\n",), refused, broken=True
            ),
        }
        what = rng.choice(list(choices))
        found = choices[what]
        return Attack("slow", what, found.parts, found.wanted, found.broken, found.half, found.leaves)

    def _chunks(self) -> Attack:
        rng = self._rng
        head = self._head("POST", self._deciding(NUMBERS), b"transfer-encoding: chunked")
        feature = self._feature()
        one = b"%x\r\n%s\r\n" % (len(feature), feature)
        bodies = {
            "sound": one + b"0\r\n\r\n",
            "a byte each": b"".join(b"1\r\n%c\r\n" % byte for byte in feature) + b"0\r\n\r\n",
            "size beyond all": b"f" * 17 + b"\r\nx",
            "size of 2**63": b"7fffffffffffffff\r\nx",
            "negative size": b"-1\r\nx\r\n0\r\n\r\n",
            "no size": b"\r\n\r\n",
            "size in words": b"zz\r\nx\r\n0\r\n\r\n",
            "long extension": b"1;" + b"a=b;" * rng.choice([10, 50_000]) + b"\r\nx\r\n0\r\n\r\n",
            "wrong size": b"5\r\nxxxxxxxxxx\r\n0\r\n\r\n",
            "line ends without returns": b"4\nxxxx\n0\n\n",
            "many trailers": one + b"0\r\n" + b"x-t: y\r\n" * rng.choice([10, 5000]) + b"\r\n",
            "a trailer that lies": one + b"0\r\ncontent-length: 5\r\nauthorization: x\r\n\r\n",
        }
        what = rng.choice(list(bodies))
        sound = what in ("sound", "a byte each")
        return Attack("chunks", what, (head + bodies[what],), broken=not sound)

    # What is hardly HTTP.

    def _broken(self) -> Attack:
        rng = self._rng
        feature = self._feature()
        path = self._deciding(NUMBERS)
        whole = self._request("POST", path, feature)
        health = b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n"
        choices = {
            "noise": rng.randbytes(rng.choice([1, 10, 1000, 100_000])),
            "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
            "HTTP/0.9": b"GET /v1/health\r\n\r\n",
            "HTTP/9.9": b"GET /v1/health HTTP/9.9\r\nhost: x\r\n\r\n",
            "HTTP/1.0": b"GET /v1/health HTTP/1.0\r\n\r\n",
            "no host": b"GET /v1/health HTTP/1.1\r\nconnection: close\r\n\r\n",
            "unknown method": b"BREW /v1/streams HTTP/1.1\r\nhost: x\r\n\r\n",
            "long method": b"G" * 100_000 + b" / HTTP/1.1\r\n\r\n",
            "CONNECT": b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n",
            "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            "absolute": b"GET http://elsewhere/v1/health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            "a null in the path": b"GET /v1/\0 HTTP/1.1\r\nhost: x\r\n\r\n",
            "bytes in the path": b"GET /v1/streams/\xff\xfe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            "a null in a header": whole.replace(b"host: service", b"host: a\0b"),
            "no colon": whole.replace(b"host: service", b"host service"),
            "a blank before the colon": whole.replace(b"host:", b"host :"),
            "a folded header": whole.replace(b"host: service", b"host: service\r\n folded"),
            "bare line ends": whole.replace(b"\r\n", b"\n"),
            "bare returns": whole.replace(b"\r\n", b"\r"),
            "length twice": whole.replace(b"content-length:", b"content-length: 5\r\ncontent-length:"),
            "the same length twice": whole.replace(b"content-length:", b"content-length: 128\r\ncontent-length:"),
            "negative length": whole.replace(b"content-length: ", b"content-length: -"),
            "length in words": whole.replace(b"content-length: ", b"content-length: x"),
            "length beyond all": whole.replace(b"content-length: ", b"content-length: 9999999999999999999999"),
            "length too small": whole.replace(b"content-length: ", b"content-length: 4\r\nx: "),
            "length and chunks": whole.replace(b"content-length:", b"transfer-encoding: chunked\r\ncontent-length:"),
            "odd transfer": whole.replace(b"content-length:", b"transfer-encoding: gzip, chunked\r\nx:"),
            "smuggled": whole.replace(b"content-length:", b"transfer-encoding : chunked\r\ncontent-length:"),
            "a hundred in one": health * 99 + health.replace(b"host: x", b"host: x\r\nconnection: close"),
            "websocket": whole.replace(b"connection: close", b"connection: upgrade\r\nupgrade: websocket"),
            "websocket in full": b"GET /v1/streams HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            "h2c": whole.replace(
                b"connection: close", b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA"
            ),
            "only line ends": b"\r\n" * 10_000,
        }
        what = rng.choice(list(choices))
        return Attack("broken", what, (choices[what],), broken=True)

    # Odd paths, ids and headers.

    def _path(self) -> Attack:
        rng = self._rng
        odd = [
            "%00", "a%00b", "%2e%2e", "..", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%252e%252e%252f", ".",
            "%5c..%5c", "%ff%fe", "%ed%a0%80", "%c0%af", "%F0%9F%98%80", "%E2%80%AE", "a%2Fb",
            "a%0d%0aset-cookie:x=y", "%0a", "%7f", "x" * 201, "x" * 5000, "x" * 60_000, "%41" * 20_000, "{stream}",
            "$(id)", "'%20or%201=1--", "a;b=c", "*", "%", "%zz", "%2", "~", "nul", "con", "-", "", "//", "///",
            "operator/s", "operator%2Fs", "streams", "\xe9",
        ]  # fmt: skip
        name = rng.choice(odd)
        routes = [
            ("GET", f"/v1/streams/{name}"),
            ("POST", f"/v1/streams/{name}/observe"),
            ("GET", f"/v1/streams/{name}/snapshots"),
            ("GET", f"/v1/streams/{name}/state"),
            ("POST", f"/v1/streams/{name}/freeze"),
            ("DELETE", f"/v1/streams/{NUMBERS}/snapshots/{name}"),
            ("DELETE", f"/v1/streams/{NUMBERS}/classes/{name}"),
            ("GET", f"/{name}"),
            ("GET", f"/v1/health?{name}"),
            ("GET", f"/v1/streams/{NUMBERS}/decisions?limit={name}&cursor={name}"),
            ("POST", f"/v1/streams/{NUMBERS}/observe?count={name}"),
            ("GET", f"/v1/streams/{NUMBERS}/{name}"),
            (rng.choice(["PATCH", "TRACE", "PROPFIND", "HEAD", "OPTIONS"]), f"/v1/streams/{name}"),
        ]
        method, path = rng.choice(routes)
        body = self._feature() if method == "POST" else b""
        # Bytes beyond ASCII are no URL, and of one this long the proxy will not hear.
        return Attack(
            "path",
            f"{method} {path[:60]}",
            (self._request(method, path, body),),
            broken="\xe9" in path or len(path) > 60_000,
        )

    def _header(self) -> Attack:
        rng = self._rng
        choices: dict[str, tuple[bytes, ...]] = {
            "a long one": (b"x-long: " + b"y" * rng.choice([9000, 70_000, 1_000_000]),),
            "many": tuple(b"x-%d: y" % n for n in range(rng.choice([100, 5000]))),
            "a long name": (b"x" * 60_000 + b": y",),
            "an empty key": (b"idempotency-key:",),
            "a long key": (b"idempotency-key: " + b"k" * rng.choice([200, 201, 100_000]),),
            "a key beyond ASCII": (b"idempotency-key: " + rng.choice([b"\xe9" * 10, b"\xff\xfe", b"\xc3\xa9"]),),
            "a key of blanks": (b"idempotency-key: \t \t",),
            "two keys": (b"idempotency-key: a", b"idempotency-key: b"),
            "a key of commands": (b"idempotency-key: *3 $3 SET $1 a $1 b",),
            "a key with a slash": (b"idempotency-key: operator/s/0",),
            "odd kind": (
                b"content-type: "
                + rng.choice([b"\xff", b";", b"/", b"image", b"application/json;" * 500, b'a/b; c="']),
            ),
            "two kinds": (b"content-type: image/png", b"content-type: application/json"),
            "an odd request id": (b"x-request-id: " + rng.choice([b"\xff\xfe", b"x" * 5000, b"<script>", b"a b"]),),
            "a traceparent": (
                b"traceparent: " + rng.choice([b"00-0-0-00", b"\xff", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"]),
            ),
            "baggage": (b"baggage: " + b"a=b," * 2000,),
            "a time limit of the proxy": (
                b"x-request-timeout-seconds: " + rng.choice([b"nan", b"inf", b"-1", b"x", b"\xff"]),
            ),
            "a session of the proxy": (b"x-session-id: " + rng.choice([b"a", b"\xff", b"x" * 1000]),),
            "a model of the proxy": (b"serve_multiplexed_model_id: " + rng.choice([b"a", b"\xff", b"x" * 1000]),),
            "another authority": (b"x-forwarded-for: 127.0.0.1", b"x-forwarded-host: evil", b"forwarded: for=1"),
            "two callers": (b"authorization: Bearer pdcs_a_b", b"authorization: Basic eA=="),
            "an odd caller": (
                b"authorization: " + rng.choice([b"Bearer", b"Bearer \xff", b"\xff", b"Bearer " + b"x" * 50_000]),
            ),
            "expectations": (b"expect: the impossible",),
            "ranges": (b"range: bytes=0-0,1-1,2-2", b"if-none-match: *"),
            "accept nothing": (b"accept: nothing/at-all;q=0", b"accept-encoding: br;q=1, *;q=0"),
        }
        what = rng.choice(list(choices))
        method, path = rng.choice(
            [("POST", self._deciding(NUMBERS)), ("POST", f"/v1/streams/{NUMBERS}/freeze"), ("GET", "/v1/streams")]
        )
        body = self._feature() if path.endswith(("observe", "peek", "explain")) else b""
        sent = self._request(method, path, body, b"", *choices[what])
        return Attack("header", what, (sent,), broken=len(sent) > 64_000, for_gateway=what in _FOR_GATEWAY)

    # States that lie.

    def _lying_state(self) -> Attack:
        rng = self._rng
        data = self._state
        what = rng.choice(
            ["sound", "cut", "flips", "length", "foreign", "noise", "other tensors", "rehashed", "rehashed"]
        )
        match what:
            case "cut":
                data = data[: rng.randrange(len(data))]
            case "flips":
                data = hostile_images._flipped(data, rng, 5)
            case "length":
                data = struct.pack("<Q", rng.choice([0, 1, 8, len(data), 2**31, 2**63, 2**64 - 1])) + data[8:]
            case "foreign":
                data = rng.choice(self._sound)
            case "noise":
                data = rng.randbytes(rng.choice([0, 7, 8, 9, 5000]))
            case "other tensors":
                data = self._tensors()
            case "rehashed":
                what, data = self._rehashed()
        sent = self._request("PUT", f"/v1/streams/{NUMBERS}/state", data, "application/octet-stream")
        return Attack("state", what, (sent,))

    def _tensors(self) -> bytes:
        """A file of safetensors whose header lies about what follows."""
        rng = self._rng
        lie = rng.choice(
            [
                {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
                {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
                {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
                {"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}},
                {"a": {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]}},
                {"__metadata__": {"state": "[" * 100_000}},
                {"__metadata__": {"state": '{"format": "protodcs-state", "content_hash": "' + "0" * 64 + '"}'}},
                {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(5000)},
            ]
        )
        head = json.dumps(lie).encode()
        return struct.pack("<Q", len(head)) + head + bytes(16)

    def _rehashed(self) -> tuple[str, bytes]:
        """A state whose hash is right and whose content is not."""
        rng = self._rng
        header, arrays = state.unpack(self._state)
        arrays = {name: array.copy() for name, array in arrays.items()}
        name = rng.choice(sorted(arrays))
        counter = rng.choice(sorted(header.counters))
        option = rng.choice(sorted(header.config))
        odd = rng.choice([0, -1, 1, 2**31, 2**62, 1e300, 0.5, True, None])
        match rng.randrange(6):
            case 0:
                what = f"array {name}: odd numbers"
                flat = arrays[name].reshape(-1)
                if flat.size:
                    values = (
                        [np.nan, np.inf, -np.inf, -1, 1e30, 0] if flat.dtype.kind == "f" else [-1, 2**62, -(2**62), 0]
                    )
                    flat[rng.randrange(flat.size)] = rng.choice(values)
            case 1:
                what = f"array {name}: another shape"
                arrays[name] = rng.choice(
                    [arrays[name].reshape(-1)[:1], np.zeros((0,)), np.zeros((3, 3, 3)), np.zeros(100_000)]
                )
            case 2:
                what = f"array {name}: gone"
                del arrays[name]
            case 3:
                what = f"counter {counter}: {odd}"
                header.counters[counter] = odd
            case 4:
                what = f"option {option}: {odd}"
                header.config[option] = odd
            case _:
                what = "classes"
                header.classes[:] = rng.choice(
                    [["x"], ["x"] * len(header.classes), header.classes + ["y"], ["z" * 100_000] * 7]
                )
        try:
            return what, state.pack(header, arrays)
        except ValueError:
            # A state that cannot even be written.
            return what, self._state[:-1]

    # Streams that nobody should have.

    def _spec(self) -> Attack:
        rng = self._rng
        eye = np.eye(3, 8).tolist()
        bodies: dict[str, Callable[[], dict[str, Any]]] = {
            "wide": lambda: {"prototypes": np.eye(2, rng.choice([5000, 200_000])).tolist()},
            "too many classes": lambda: {"prototypes": [[1.0]] * 10_001},
            "many classes": lambda: {"prototypes": np.eye(2000, 16).tolist()},
            "all the same": lambda: {"prototypes": [[1.0, 0.0]] * 5},
            "one class": lambda: {"prototypes": [[1.0]]},
            "tiny numbers": lambda: {"prototypes": [[1e-40, 0.0], [0.0, 1e-40]]},
            "huge numbers": lambda: {"prototypes": [[1e308, 1e308], [1.0, 0.0]]},
            "odd settings": lambda: {
                "prototypes": eye,
                "config": {
                    rng.choice(
                        ["temperature", "history", "target_false_reject", "class_bias_limit", "linear_head", "nonsense"]
                    ): rng.choice([0, -1, 1, 65_536, 10**9, 1e-300, 1e300, "x", None, [], True])
                },
            },
            "odd guard": lambda: {
                "prototypes": eye,
                "guard": {
                    rng.choice(["window", "disagreement", "keep_windows", "action"]): rng.choice(
                        [0, -1, 10**9, 0.5, "x", None]
                    )
                },
            },
            "like itself": lambda: {"like": f"born {rng.randrange(5)}"},
            "like nobody": lambda: {"like": rng.choice(["nobody", "../x", "\0", "x" * 10_000, "operator/s", ""])},
            "long class names": lambda: {"classes": ["x" * rng.choice([999, 1001, 1_000_000])] + ["y", "z"]},
            "odd class names": lambda: {
                "classes": ["\0", "{}", "{0.__class__}", "%s", "\u202e", " ", "\n"][: rng.randint(1, 7)]
            },
            "a list by path": lambda: {
                "classes": rng.choice(["/etc/passwd", "../../x", "cifar10\0", "http://localhost/x"])
            },
        }
        what = rng.choice(list(bodies))
        body = json.dumps({"id": f"born {rng.randrange(5)}", **bodies[what]()}).encode()
        create = self._request("POST", "/v1/streams", body, "application/json")
        return Attack("spec", what, (create,))

    # Text that cannot be encoded.

    def _surrogate(self) -> Attack:
        """Put half of a surrogate pair into one string field of one body."""
        rng = self._rng
        text = rng.choice(["\ud800", "a\udfff", "\udc00\ud800"])
        eye = np.eye(3, 8).tolist()
        streams = "/v1/streams"
        bodies: dict[str, tuple[str, dict[str, Any]]] = {
            "id": (streams, {"id": text, "prototypes": eye}),
            "class": (streams, {"id": "born 0", "classes": ["x", text, "y"]}),
            "class list": (streams, {"id": "born 0", "classes": text}),
            "like": (streams, {"id": "born 0", "like": text}),
            "method": (streams, {"id": "born 0", "prototypes": eye, "method": text}),
            "option": (streams, {"id": "born 0", "prototypes": eye, "config": {text: 1}}),
            "value of an option": (
                streams,
                {"id": "born 0", "prototypes": eye, "method": "protodcs", "config": {"evolution_gate": text}},
            ),
            "guard option": (streams, {"id": "born 0", "prototypes": eye, "guard": {text: 1}}),
            "value of a guard option": (streams, {"id": "born 0", "prototypes": eye, "guard": {"action": text}}),
            "unknown field": (streams, {"id": "born 0", "prototypes": eye, text: 1}),
            "snapshot": (f"/v1/streams/{NUMBERS}/snapshots", {"name": text}),
            "roll-back": (f"/v1/streams/{NUMBERS}/rollback", {"name": text}),
            "new class": (f"/v1/streams/{NUMBERS}/classes", {"name": text, "prototype": [1.0] * 32}),
            "feature": (f"/v1/streams/{NUMBERS}/observe", {"features": [[text]]}),
        }
        field = rng.choice(list(bodies))
        path, body = bodies[field]
        sent = self._request("POST", path, json.dumps(body).encode(), "application/json")
        return Attack("surrogate", field, (sent,), wanted=REFUSED)

    # Settings that cost the most.

    def _expensive(self) -> Attack:
        """Create a stream with some options at their largest or smallest, or let such a stream learn much at once."""
        rng = self._rng
        stream = f"expensive {rng.randrange(8)}"
        if rng.random() < 0.5:
            rows = [self._features[rng.randrange(len(self._features))].astype(float).tolist() for _ in range(256)]
            body = json.dumps({"features": rows}).encode()
            observe = self._request("POST", f"/v1/streams/{quote(stream)}/observe", body, "application/json")
            return Attack("expensive", "observe 256 rows", (observe,))
        method, extremes = rng.choice(list(_EXTREMES.items()))
        count = min(rng.choice([1, 2, 8, 20]), len(extremes))
        options = {name: rng.choice(limits) for name, limits in rng.sample(extremes, count)}
        new = {"id": stream, "prototypes": self._prototypes, "method": method}
        body = json.dumps({**new, "config": options}).encode()
        what = ", ".join(f"{name}={value}" for name, value in options.items())
        return Attack("expensive", what[:100], (self._request("POST", "/v1/streams", body, "application/json"),))

    # Many imports.

    def _import(self) -> Attack:
        """Import a sound state of a stream that has learned a lot, or roll back to one."""
        rng = self._rng
        if rng.random() < 0.8:
            path, body = f"/v1/streams/{NUMBERS}/state", self._large_state
            return Attack("import", "state", (self._request("PUT", path, body, "application/octet-stream"),))
        verb, name = rng.choice(["snapshots", "rollback"]), f"s{rng.randrange(12)}"
        sent = self._request(
            "POST", f"/v1/streams/{NUMBERS}/{verb}", json.dumps({"name": name}).encode(), "application/json"
        )
        return Attack("import", verb, (sent,))


def _extremes(config: type[StreamDCSConfig] | type[ProtoDCSConfig]) -> list[tuple[str, list[float]]]:
    """Return the numeric options of a method, each with the limits of its range."""
    found = []
    for name, field in config.model_fields.items():
        limits = [
            getattr(constraint, bound)
            for constraint in field.metadata
            for bound in ("ge", "gt", "le", "lt")
            if hasattr(constraint, bound)
        ]
        if limits:
            found.append((name, limits))
    return found


_EXTREMES = {"streamdcs": _extremes(StreamDCSConfig), "protodcs": _extremes(ProtoDCSConfig)}
