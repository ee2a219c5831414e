"""Replicas that join and leave a running job; nothing outside of this folder knows them.

strategy     the strategy: one Trainer per replica
algorithm    Streaming DiLoCo on a job's log
transport    its exchanges
log          the log in a store (`stores`), as one rank of a replica sees it
ranks        what the ranks of a replica share
decision     when to average an exchange, and whose messages
"""
