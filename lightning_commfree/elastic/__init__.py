"""Replicas that join and leave a running job; nothing outside of this folder knows them.

strategy     the strategy: one Trainer per replica
algorithm    Streaming DiLoCo on a job's log
transport    its exchanges
log          the log in a store (`stores`), as one rank of a replica sees it
ranks        what the ranks of a replica share
decision     when to average an exchange, and whose messages
parts        parts of messages, which their owners reduce for all
lateness     warnings about settings with which replicas come too late
polling      how often to look at the store
status       what the log says about a job, for `commfree-store status`
"""
