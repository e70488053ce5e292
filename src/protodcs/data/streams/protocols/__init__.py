"""Every protocol by name. A new one is a file beside this one and a line below."""

from . import all_unknown, bursty, continual, correlated, no_unknown, reset, stamp, unient, whole

REGISTER = {
    "continual": continual.PROTOCOL,
    "reset": reset.PROTOCOL,
    "unient": unient.PROTOCOL,
    "stamp-4to1": stamp.PROTOCOL,
    "correlated": correlated.PROTOCOL,
    "bursty": bursty.PROTOCOL,
    "no-unknown": no_unknown.PROTOCOL,
    "all-unknown": all_unknown.PROTOCOL,
    "whole": whole.PROTOCOL,
}
