"""Replicas that join and leave a running job; nothing outside of this folder knows them.

What the strategy uses:

strategy             the strategy: one Trainer per replica
algorithm            Streaming DiLoCo whose replicas join
transport            exchanges that are repeated when a member dies
membership           who takes part in the next exchange
lighthouse           torchft's lighthouse, as the place where replicas meet
lighthouse_command   `commfree-lighthouse`, which serves one
board                reading its page
state_server         serving a joiner the state
member_watch         noticing that a member has died
replica_ranks        several ranks in one replica

What will replace it, without views, quorums and open ports; no strategy uses it yet:

log_algorithm        Streaming DiLoCo on a job's log
log_transport        its exchanges
log                  the log in a store (`stores`), as one replica sees it
decision             when to average an exchange, and whose messages
"""
