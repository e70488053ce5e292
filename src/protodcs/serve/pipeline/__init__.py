"""The way of a request: from its place in a queue to its reply. CONTRIBUTING.md draws it.

- `queues`: the only place where requests wait for their stream.
- `turns`: shares the event loop among streams.
- `pipeline`: serves a group of requests: computes a slice, puts its records into the next commit, and replies after it.
- `steps`: what one request does to a stream in memory.
- `commit`: writes the records of all streams together.
"""
