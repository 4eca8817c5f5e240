"""The server: the protocol of the public SDK on one side, a `Service` on the other, and a journal
between them.

Nothing that was acknowledged is lost or done twice. Training requests are on disk before they are
acknowledged, run in the order of their `seq_id`, and are replayed on the last snapshot of their
model after a crash. `server.Server` is that machine, without any HTTP; the routes turn requests
into its calls and its answers into bodies.
"""
