"""What a stream can and cannot decide."""
