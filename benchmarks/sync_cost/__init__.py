"""What does a sync cost by the number of replicas, and the outer state in memory?"""
