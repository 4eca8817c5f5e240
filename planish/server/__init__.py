"""The server: the wire protocol of the public SDK on one side, a `Service` on the other, and a
journal between them.

No acknowledged request is lost or run twice. Training requests are on disk before they are
acknowledged, run in the order of their `seq_id`, and are replayed on the last snapshot of their
model after a crash. `server.Server` does this without HTTP; the routes in `http/` decode requests
and encode results.
"""
