"""Workers hold the streams: they decide, learn and commit. A router finds the worker of each stream."""
