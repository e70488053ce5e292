"""The service: thousands of streams, each with one owner, none of whose acknowledged samples is ever lost.

From the outside inwards: `api` speaks HTTP, `encoder` makes features of images, `owners` holds streams awake and finds
them, `stream` is one of them, and `store` keeps what all of them have learned. `access` and `telemetry` serve the rooms
above them, and `deploy` puts all of it on Ray. Calls go downwards only.
"""
