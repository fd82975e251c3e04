"""Capacity planning: expected performance of clusters described in a TOML file.

`cluster` parses the file, `capacity` makes planner requests from it and compares alternatives,
`report` computes the figures of a plan, and `svg` draws its timeline. Nothing here reads files.
Start with `cluster`.
"""
