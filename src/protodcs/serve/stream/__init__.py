"""One stream: awake, at rest, and what it remembers. No clock, no network, no store."""
