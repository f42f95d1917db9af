"""Fetching models: the only room that connects to other hosts, and only for `onedesk pull`."""
