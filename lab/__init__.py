"""Experiments that `onedesk bench` does not reach, run as `python -m onedesk.lab.NAME` from a checkout; never
installed, never imported.
"""
