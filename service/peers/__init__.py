"""Other engines behind the same door: the service of this machine, servers that speak OpenAI's API, and children that
we start.

`peer.py` is what each kind of them is; `remote.py` is a model that one of them runs, with the methods of api.OpenModel
that nodes use.
"""
