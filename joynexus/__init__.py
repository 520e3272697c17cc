"""joynexus: multi-tenant post-training of Vision-Language-Action policies on Ray."""
