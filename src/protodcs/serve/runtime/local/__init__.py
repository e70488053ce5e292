"""The service in one process, with its streams in SQLite."""
