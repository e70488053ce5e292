"""Streams: create, list, look at, freeze, reset and delete."""
