"""The method itself: a pure state machine over unit features.

Nothing here uses images, networks, clocks or randomness, or imports from a package above it.
"""
