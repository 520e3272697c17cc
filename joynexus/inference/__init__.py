"""The inference engine: policy versions, and acting for many tenants in one forward. No Ray."""
