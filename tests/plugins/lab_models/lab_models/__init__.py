"""A backbone that cuts frames into patches, and an action module that is one linear layer."""
