"""The `elastic-sim` command.

`cli` has the group and the commands on traces, published values and validation. `commands` has
those that run policies, and `options` their shared options. Nothing is computed here. Modules
that need an optional library are imported by the command that needs them, before its work begins.
"""
