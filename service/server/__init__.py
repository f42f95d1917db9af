"""The service: OpenAI's HTTP API, the memory API and figures over the one door, on loopback and behind a token
unless told otherwise.
"""
