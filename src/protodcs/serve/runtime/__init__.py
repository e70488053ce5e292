"""Checks the settings of a service, starts it in this process, and stops it."""
