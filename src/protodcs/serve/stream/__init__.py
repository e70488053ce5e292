"""One stream: loaded, stored, and its idempotency keys. No clock, no network, no store."""
