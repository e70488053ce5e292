"""The method itself: a pure state machine over unit features.

Nothing in this room knows of images, networks, clocks or randomness, and nothing imports from a room above it.
"""
