"""The benchmark: a grid of methods x streams x seeds, run cell by cell, and the tables and pictures that come of it.

    protodcs bench run grids/clip-features.yaml --out results
    protodcs report results --out report

A cell's rows carry all that its figures depend on. Runs can be interrupted and resumed, here or on a Ray cluster.
"""
