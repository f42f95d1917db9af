"""Models that run in other engines: the service of this machine, servers that speak OpenAI's API, and child processes.

`peer.py` is the interface of every kind; `remote.py` is a model of such an engine, with the methods of api.OpenModel
that nodes use.
"""
