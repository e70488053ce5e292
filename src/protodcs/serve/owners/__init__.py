"""Who holds which stream: a router that finds the owner, owners that decide, learn and commit, a cluster of them."""
