"""Streams as data: a manifest fixes which images come, in which order, under which corruption.

    manifest = build("continual", known=cifar10, unknown=svhn, seed=0)
    manifest.save("continual-0.txt")
    manifest = Manifest.load("continual-0.txt")
    manifest.verify({"cifar10-test": cifar10, "svhn-test": svhn})

The same arguments give the same bytes on every machine; `manifest.hash` names them in results.
"""

from .building import build, protocols
from .header import Origin, Segment
from .manifest import Manifest
from .summary import summary

__all__ = ["Manifest", "Origin", "Segment", "build", "protocols", "summary"]
