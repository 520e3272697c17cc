"""What the engines do, without Ray: the group forward, the reuse of prefixes, the memory."""
