"""How the service runs: `local` is one process, `ray` is a cluster. Only `ray` imports Ray."""
