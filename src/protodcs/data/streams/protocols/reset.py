"""The streams of `continual`, sample for sample, with adaptation started afresh before every corruption."""

from dataclasses import replace

from . import continual

PROTOCOL = replace(continual.PROTOCOL, resets=True)
