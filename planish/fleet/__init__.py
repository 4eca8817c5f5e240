"""Engines outside of the caller's process: one in a spawned process, or several replicas on Ray.

fleet.py            `Service` in front of several replicas
samplers.py, training.py, routing.py, replica_set.py, replica.py
                    the parts of a fleet
remote_engine.py    `Service` on one engine in another process
link.py             the connection to that engine: process.py, or ray_link.py
host.py             the engine's side of the connection
vllm/               an engine whose samples come from vLLM
"""
