"""The service: thousands of streams over HTTP. It replies only after a change is durable.

`api` has the HTTP routes, `encoder` turns images into features, `workers` hold loaded streams and route requests to
them, `stream` is the state machine of one stream, and `store` makes changes durable. `access` has keys, roles and
limits; `telemetry` has logs, metrics and traces. `runtime` starts all of it in one process, and `cluster` lets many
such processes share their streams.
"""
