"""Measurements that are kept: each prints ratios of things timed in one run, interleaved, on one thread."""
