"""The service: thousands of streams, each with one owner, none of whose acknowledged samples is ever lost.

From the outside inwards: `app` speaks HTTP, `router` finds the owner of a stream, `owner` holds streams in memory, and
`store` keeps what all of them have learned.
"""
