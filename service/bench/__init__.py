"""What `onedesk bench` measures: load, prefill and decode, with the machine's read bandwidth and a peer in the same
run.
"""
