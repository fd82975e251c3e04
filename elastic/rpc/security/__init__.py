"""Identity of the processes of a job, and rejection of everybody else.

`tls` has the certificates and the settings of a process. `token_proof` proves knowledge of the join
token without sending it. `unauthenticated` limits the number of connections that have not proved
anything yet. `rejections` counts and reports what a port rejects.

These modules open no connection themselves; `control` and `bulk` do. Start with `tls`.
"""
