"""Messages between the coordinator and its agents and commands, over gRPC.

`envelope` has the wire format. `server` is the coordinator's side: one session per node, and calls
of the command line. `client` is the other side. `broadcast` encodes a message to many nodes once,
`channel_options` has gRPC's settings, `connection_watch` bounds unauthenticated connections, and
`event_loop` runs all of gRPC's work.

Messages pass through unchanged: the coordinator decides whether a sender may say something. Start
with `envelope`.
"""
