"""How processes of a job prove their identity, and what they reject.

`tls` has the certificates and the settings of a process. `token_proof` proves knowledge of the join
token without sending it. `unauthenticated` gives connections that have not proved anything yet a
limited number of places. `rejections` counts and reports whatever a port rejects.

These modules open no connection themselves; `control` and `bulk` do. Start with `tls`.
"""
