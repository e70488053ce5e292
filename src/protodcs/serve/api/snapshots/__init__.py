"""Saved snapshots of a stream."""
