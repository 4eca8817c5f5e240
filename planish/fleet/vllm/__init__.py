"""vLLM as a sampler: planish trains and scores, and vLLM servers sample.

engine.py    an engine whose samples come from vLLM
model.py     the vLLM servers of one base model, and the adapters that they serve
server_set.py  which of the servers are in use
requests.py  which requests vLLM can answer, and where their samples end
server.py    the HTTP requests to one vLLM server
process.py   starts and ends a vLLM server
options.py   the options
"""
