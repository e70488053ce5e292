"""The service on a Ray cluster: workers and controller as actors, encoder and HTTP on Ray Serve, streams in Redis."""
