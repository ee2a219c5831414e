"""Elastic replicas of unequal speed, and the cost of being elastic."""
