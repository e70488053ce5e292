"""The whole state of a stream."""
