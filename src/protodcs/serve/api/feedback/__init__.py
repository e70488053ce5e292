"""Corrections by people, and the samples they should look at."""
