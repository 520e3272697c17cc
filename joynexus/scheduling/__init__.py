"""Pure decisions: placement, fairness, health and scaling. No Ray, torch, numpy or clock."""
