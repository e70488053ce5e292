"""Clusters of rejected samples."""
