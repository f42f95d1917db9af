"""Experiments beyond `onedesk bench`, run as `python -m onedesk.lab.NAME` from a checkout; never installed, never
imported.
"""
