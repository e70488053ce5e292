"""Events of streams, as they happen."""
