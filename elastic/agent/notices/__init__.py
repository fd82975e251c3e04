"""Notices: warnings that the node will be taken away.

`controller` follows them for the agent; start reading here. `discovery` turns `--notice` into
sources. Each source is a class in a file of its own: `aws`, `azure` and `gcp` ask metadata services
(`metadata` has their HTTP client), `file` reads a file, `hook` listens for HTTP requests. `source`
has the interface that a new source implements.

Sources only report; the rules are in `elastic.core.node.notice_tracker`.
"""
