"""Who holds which stream: a router that finds the worker, workers that decide, learn and commit, a cluster of them."""
