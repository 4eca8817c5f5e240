"""Tensor parallelism: one base model on several devices of this machine.

Rank 0 is the engine's process. It has the scheduler, the trainer and the optimizer state. The other
ranks are processes that only run the decoder. Rank 0 sends each of them the plan of every pass.

    shards.py        which part of each weight and of each adapter a rank has
    collectives.py   the sums and broadcasts within a pass
    group.py         the processes of the other ranks, and the messages to them
    decoder.py       the decoder, backend and adapters of rank 0
    follower.py      the process of another rank, with its KV cache in follower_cache.py
"""
