"""What the service tells of itself: numbers, lines, traces, and whether it is ready."""
