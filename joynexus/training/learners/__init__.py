"""Learners: from the items of a tenant's lane to its training calls, one learner per training workload."""
