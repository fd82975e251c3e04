"""Transfer of copies between vaults, and from workers to vaults, over TCP.

`transfer` has the requests and the client; the server is `elastic.agent.vault.server`. `handshake`
opens a connection with TLS and the join token. `blocks` sends and reads copies, and `compression`
decides which ones are compressed.

A checksum over the raw bytes decides whether a copy is whole, whatever the connection did. Start
with `transfer`.
"""
