"""Classes of a stream."""
