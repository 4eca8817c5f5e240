"""Engines outside of the caller's process: one in a spawned process, or several replicas on Ray.

host.py             runs an engine for a caller in another process
link.py             the connection between the two, as an interface
process.py          a link to a spawned process
remote_engine.py    `Service` on a link
"""
