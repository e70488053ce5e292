"""The decision log of a stream."""
