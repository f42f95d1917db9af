"""The service: OpenAI's HTTP API, the memory API and metrics. By default it listens on loopback only and requires a
token.
"""
