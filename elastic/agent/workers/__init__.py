"""Worker processes of a node: `processes` starts and ends them, `output` copies their standard
output and error, and `channels` receives their messages.

Start with `processes`. Nothing here knows the rules of a node or keeps state between launches.
"""
